"""The visual report: one self-contained HTML page about a run."""

from linnet.report.html import render, write_report
from linnet.report.records import (
    Choice,
    Comparison,
    Coverage,
    DoubtedLabel,
    Explanation,
    FitRecord,
    Forgetting,
    HeldOutSet,
    Neighbor,
    Notes,
    PreflightText,
    Reliability,
    RidgeChoice,
    RidgePath,
    Samples,
    Scores,
    Spectrum,
    Step,
    Timing,
    TrainingSet,
)
from linnet.report.run import Run
from linnet.report.task_kernel import TaskKernel

__all__ = [
    "Choice",
    "Comparison",
    "Coverage",
    "Explanation",
    "FitRecord",
    "Forgetting",
    "HeldOutSet",
    "Neighbor",
    "Notes",
    "PreflightText",
    "Reliability",
    "RidgeChoice",
    "RidgePath",
    "Run",
    "Samples",
    "Scores",
    "Spectrum",
    "Step",
    "DoubtedLabel",
    "TaskKernel",
    "Timing",
    "TrainingSet",
    "render",
    "write_report",
]

"""The interface of all fitted models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from linnet.errors import InputError
from linnet.hub.folder import write_folder
from linnet.hub.remote import push
from linnet.predictive.distribution import Predictive
from linnet.predictive.plots import ModelPlots
from linnet.shown import Shown
from linnet.tangent.batch import Inputs


class PredictiveModel(Shown):
    """A fitted model: ``predict`` gives outputs, ``predictive`` their distribution."""

    @abstractmethod
    def predictive(self, x: Inputs) -> Predictive:
        """The distribution of the outputs, given the data.

        Args:
            x: N examples.

        Returns:
            The distribution.
        """

    def predict(self, x: Inputs) -> Tensor:
        """The mean of the outputs.

        Args:
            x: N examples.

        Returns:
            E[f(x)], (N, C).

        Raises:
            DataError: If x is empty or not finite.
        """
        return self.predictive(x).mean

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """Summary of the fit, as plain numbers and text.

        Returns:
            A dict that ``json`` can write.
        """

    def save(self, directory: str | Path) -> Path:
        """Write the model to a folder.

        Args:
            directory: The folder.

        Raises:
            InputError: Models of this kind have no file format.
        """
        name = type(self).__name__
        raise InputError(
            f"save({str(directory)!r}) of a {name}",
            expected="a LinearFit, SharedFit, SoftmaxFit, NestedFit, Laplace, TangentGP or Finetuned",
            remedy=f"keep the data and the network's state_dict, and make the {name} again from them",
        )

    def save_pretrained(self, directory: str | Path, card: Mapping[str, Any] | None = None) -> Path:
        """Write a folder as the Hugging Face Hub keeps them; ``linnet.load`` reads it.

        Tensors are in safetensors files, everything else in ``linnet.json``, and ``README.md`` is a model
        card with the summary; one that was edited since stays. Fits hold their training samples.

        Args:
            directory: The folder; made if missing. Other files in it stay.
            card: Entries of the card's metadata, such as ``{"license": "mit"}``; linnet chooses no license.

        Returns:
            The folder.

        Raises:
            InputError: Models of this kind have no file format, or the folder cannot be written.
            DiskSpaceError: The disk has no space for it; an old folder stays as it was.
        """
        self._require_format(directory)
        return write_folder(directory, self, card)

    def push_to_hub(self, repo_id: str, private: bool = True, card: Mapping[str, Any] | None = None) -> str:
        """Write the folder of :meth:`save_pretrained` into a repository of the Hugging Face Hub.

        ``linnet.load("hf:user/name", model)`` reads it. The Hub keeps what was there before in its history,
        samples that were forgotten since among it.

        Args:
            repo_id: The repository, ``"user/name"``; made if it is missing.
            private: Whether nobody else may see it; a public repository is refused then.
            card: Entries of the model card's metadata. A card that was edited on the Hub stays.

        Returns:
            The address of the commit.

        Raises:
            DependencyError: huggingface_hub is missing.
            InputError: Models of this kind have no file format, or the Hub refuses.
        """
        name = type(self).__name__
        self._require_format(repo_id)
        return push(
            repo_id, lambda place, at: write_folder(place, self, card, at), private, f"{name} of linnet"
        )

    def _require_format(self, place: str | Path) -> None:
        """Raise if models of this kind have no file format."""
        if type(self).save is PredictiveModel.save:
            self.save(place)

    @property
    def plot(self) -> ModelPlots:
        """Plots of its predictions: ``calibration``, ``predicted`` and ``curve``."""
        return ModelPlots(self)

    def _shown(self) -> dict[str, Any]:
        return self.summary()

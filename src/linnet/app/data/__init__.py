"""Readers: an image folder, an ``.npz`` archive or a ``.csv`` table becomes a checked train and test set."""

from linnet.app.data.arrays import read_arrays
from linnet.app.data.folder import check_images, decode_image, read_folder
from linnet.app.data.load import load_data
from linnet.app.data.splits import draw_shots, split_at_random, split_by_class
from linnet.app.data.table import read_table
from linnet.app.data.task import Part, TaskData
from linnet.app.data.transforms import PRESETS, ImageTransform, Standardize, image_transform

__all__ = [
    "load_data", "read_folder", "read_arrays", "read_table", "decode_image", "check_images",
    "TaskData", "Part",
    "ImageTransform", "Standardize", "image_transform", "PRESETS",
    "draw_shots", "split_at_random", "split_by_class",
]  # fmt: skip

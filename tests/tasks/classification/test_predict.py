"""Predictions for files: which files are found."""

from dkcls.tasks.classification.predict import find_images


def test_images_are_found_below_folders_by_name_whatever_their_case(tmp_path):
    for name in ("b/2.JPG", "b/1.png", "a.jpeg", "notes.txt", "c/B.Png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = find_images(["x.txt", str(tmp_path)])
    assert found == [
        "x.txt",
        *(str(tmp_path / name) for name in ("a.jpeg", "b/1.png", "b/2.JPG", "c/B.Png")),
    ]

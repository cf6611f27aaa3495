"""A data set with a file that cannot be read; here, because loading processes import its module."""

import time

from dkcls.data.dataset import register_dataset
from dkcls.data.sets.folder import ImageFolder


@register_dataset("stuck")
class Stuck(ImageFolder):
    """Image files of which the one that the file `stuck` names cannot be read to its end.

    It can as soon as there is no such file.
    """

    def read(self, index):
        mark = self.folder.parent / "stuck"
        while mark.exists() and self.name(index).endswith(mark.read_text()):
            (self.folder.parent / "reading").touch()
            time.sleep(0.05)
        return super().read(index)

"""Write the photographs of squeezebox[demo], as arrays that need no image library.

    pip install scikit-image; python scripts/make_photographs.py

They are three of scikit-image's, one of them cut; src/squeezebox_demo/NOTICE says whose they are.
"""

import numpy as np
from skimage import data

from squeezebox.cli._data import demo_file


def main() -> None:
    """Write the file."""
    middle = data.retina()[450:962, 450:962]
    path = str(demo_file("photographs.npz"))
    np.savez_compressed(path, retina=middle, cat=data.chelsea(), coffee=data.coffee())


if __name__ == "__main__":
    main()

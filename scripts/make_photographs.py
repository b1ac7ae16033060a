"""Write the photographs that ship with the package, as arrays that need no image library.

    pip install scikit-image; python scripts/make_photographs.py

They are three of scikit-image's, one of them cut; src/squeezebox/cli/data/NOTICE says whose they are.
"""

import numpy as np
from skimage import data

from squeezebox.cli._gigapixel import PHOTOGRAPHS


def main() -> None:
    """Write the file."""
    middle = data.retina()[450:962, 450:962]
    np.savez_compressed(str(PHOTOGRAPHS), retina=middle, cat=data.chelsea(), coffee=data.coffee())


if __name__ == "__main__":
    main()

"""A federation on a virtual clock that decides, orders, admits and offloads by the code of production."""

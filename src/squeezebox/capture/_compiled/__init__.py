"""The compiled front: Inductor's graphs, cut as it cuts them, with what forward hands over in fewer bits."""

"""TupleDict: what the wrappers return."""


class TupleDict(dict):
    """A dict that also behaves as the tuple of its values.

    ``result["d_row_tensor"]`` is by name and ``result[0]`` by position (IndexError when negative or too large).
    Iteration, unpacking, ``tuple(result)`` and ``reversed(result)`` give the values in key order; ``keys()``,
    ``items()``, ``in`` and ``**result`` are those of a dict. Not hashable.
    """

    def __iter__(self):
        return iter(self.values())

    def __reversed__(self):
        return reversed(self.values())

    def __getitem__(self, key):
        if not isinstance(key, int):
            return super().__getitem__(key)
        if not 0 <= key < len(self):
            raise IndexError(f"TupleDict: expected a position in [0, {len(self)}), got {key}")
        return tuple(self.values())[key]

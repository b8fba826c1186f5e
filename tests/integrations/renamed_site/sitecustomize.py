"""Rename words in the source of modules while Python imports them: `RENAMES`, {module: {old: new}} as JSON."""

import importlib.abc
import importlib.machinery
import json
import os
import re
import sys

RENAMES = json.loads(os.environ.get("RENAMES") or "{}")


class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        text = self.get_data(self.path).decode()
        for old, new in RENAMES[fullname].items():
            text = re.sub(rf"\b{old}\b", new, text)
        return compile(text, self.path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in RENAMES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = Loader(name, spec.origin)
        return spec


if RENAMES:
    sys.meta_path.insert(0, Finder())

"""Integrations: a folder or a file for each package in which `optim: muon` works.

No package below it imports these packages. This one may import every package below it, and `dry_run` and `cli` import
it. A module of another package is patched right after its own import: `hf_muon._autoload.HOOKS` lists each feature with
its module and the function here that patches it, and is where an integration is added. Users call
`deepspeed.initialize`.

File names that folders share:

- `hooks`: patches of the other package. Each function yields all changes of one feature, without making them.
- `handler`: turns the other package's arguments into options and a `Muon`.
- `refusals`: settings that are refused, with the reason and what to do instead. These functions change nothing.
  `transformers/run_refusals` asks those of the layouts that a Trainer may run in.

A small integration is one file. Other files are named for what they contain (`ulysses/batches`). All
integrations share `names` and `archives`.
"""

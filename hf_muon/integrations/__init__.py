"""Who calls us: one folder, or one file, for each package that `optim: muon` works in.

Only this room names those packages; it may import every room below it, and only `cli` imports it. A module of another
package is patched right after its own import: `hf_muon._autoload.HOOKS` lists each feature with its module and the
function here that patches it, and is the one place to add an integration to. What users call here is
`deepspeed.initialize`.

The same file names mean the same thing in each folder:

- `hooks`: what patches the other package. Each function yields every change of one feature, and makes none itself.
- `handler`: from the other package's arguments to options and to a `Muon`.
- `refusals`: what is refused, with the reason and what to do instead; nothing there changes anything.

A folder has those of them that it needs, and a small integration is one file. Other files are named for what they
hold (`ulysses/batches`, `transformers/training_file`). At this level stand `names`, which every integration shares,
and `archives`.
"""

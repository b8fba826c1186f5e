"""One harness for equality: however a model is stored, and whatever steps it, the results are those of one process.

A cell (`cells.Cell`) is a place (a layout on some ranks), a model, the dtypes of weights and moments, a rule, and how a
checkpoint is written and where it goes next. Every cell takes four steps with the same given gradients, by way of the
layout's own backward pass where it has one, and five things are checked:

1. weights and moments are, bit by bit, those of one process;
2. all ranks have the same whole tensors;
3. a run that was saved and resumed is the uninterrupted one;
4. what was saved in this place goes on in another one, with the same bits;
5. a step that one rank cannot take is refused by all with one error, and changes nothing.

`layouts.Layout` is what a framework must tell of itself: some ten lines for each. `test_cells` draws cells so that each
pair of values meets; failures print the cell as a line that `python -m tests.equality` runs again.
"""

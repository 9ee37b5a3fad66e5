"""The codes of all findings: what each means, and what to do, in one sentence each.

1xx plan file, 2xx match and shape, 3xx layout and cost, 4xx checkpoint. `docs/errors.md` shows an example
of each. This file knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CODES", "Code", "meaning"]


@dataclass(frozen=True)
class Code:
    """What a code means, and the remedy. The finding itself has place, numbers and the lines to write."""

    means: str
    remedy: str


CODES: dict[str, Code] = {
    "AT101": Code(
        "The plan file cannot be read, or no shipped plan has that name.",
        "Check the path; `autotp plans` lists what is shipped.",
    ),
    "AT102": Code(
        "The text is not one YAML or JSON document that a plan could be.",
        "Mend the line under the carets; a plan is one small document.",
    ),
    "AT103": Code(
        "The plan uses what plans do without: aliases, anchors, merge keys, tags, keys that are not text.",
        "Write it out plainly; start no pattern with `*`.",
    ),
    "AT104": Code("A key is given twice; YAML would keep the last one silently.", "Keep one of the two."),
    "AT105": Code(
        "The plan has a key that plans do not have, or is no mapping at all.",
        "A plan has `version`, `model_type`, `rules` and `optional`.",
    ),
    "AT106": Code("The plan's version is not one that autotp reads.", "Write `version: 1`."),
    "AT107": Code("The plan has no rules.", "Put at least one `pattern: style` under `rules`."),
    "AT108": Code(
        "A pattern cannot match any name.",
        "Patterns match whole segments of a name from its end; `*` is one segment.",
    ),
    "AT109": Code(
        "A rule has no style, or one that there is not.", "The styles are column, row, vocab and replicate."
    ),
    "AT110": Code("A rule has an option that there is not.", "Take the nearest name, or leave it out."),
    "AT111": Code("An option has a value that it cannot have.", "Take one of the values that are named."),
    "AT112": Code(
        "An option belongs to another style than the rule's.", "Leave it out, or change the style."
    ),
    "AT113": Code(
        "`optional` names a pattern that is no rule of the plan.", "Name it as it stands under `rules`."
    ),
    "AT114": Code(
        "transformers' plan has an entry that no rule can say.",
        "Leave that layer whole, by a plan of your own.",
    ),
    "AT115": Code(
        "transformers cannot carry a rule of the plan.",
        "Use the plan with autotp, or change the rule; `plan.to_transformers(analysis)` writes whole names.",
    ),
    "AT201": Code(
        "A rule matches nothing in the model.",
        "Mend the name, or put the pattern under `optional` if it may be absent.",
    ),
    "AT202": Code("The whole plan matches nothing in the model.", "Take the plan of this model."),
    "AT203": Code(
        "There are fewer units (heads, rows, features) than ranks, and they cannot be shared.",
        "Take a tp that works; kv heads may be shared where the query heads beside them are declared.",
    ),
    "AT204": Code(
        "The declared heads or sections do not fit the tensor's size, or the layers before a row layer.",
        "Declare what the layer holds; sizes can be config keys.",
    ),
    "AT205": Code(
        "A rule names a config key that the model's config lacks, or that is no number.",
        "Name a key of the config, or write the number.",
    ),
    "AT206": Code("The style does not fit the module.", "Take the style of its kind, or `replicate`."),
    "AT207": Code(
        "A rule for a tensor lacks its dim, or has one that the tensor lacks.",
        "A rule for a parameter or buffer states the `dim` that is cut.",
    ),
    "AT208": Code(
        "Two patterns that match one module are equally strong.", "Add a name to the one that is meant."
    ),
    "AT209": Code("Two rules cut one tensor in two ways.", "Keep one of them."),
    "AT210": Code("A tied tensor is placed in two ways.", "Make the rules of its names agree."),
    "AT211": Code("A tied tensor is cut under one of its names only.", "Add a rule for its other layer."),
    "AT212": Code("A rule decides nothing: stronger patterns take all it matches.", "Leave it out."),
    "AT213": Code("A rule matches a module without tensors of its own.", "Name the layers inside of it."),
    "AT214": Code(
        "The module has a tensor that its style does not know how to cut.", "Give that tensor its own rule."
    ),
    "AT215": Code("Optional rules match nothing in this model.", "Nothing: that is what optional means."),
    "AT221": Code("The model is scripted or compiled.", "Shard first, then script or compile."),
    "AT222": Code(
        "A weight is computed from others: parametrized, weight-normed or pruned.",
        "Remove the parametrization first.",
    ),
    "AT223": Code("The model is wrapped or hooked by another tool.", "Shard first, then wrap."),
    "AT224": Code("A weight is no plain tensor: quantised, lazy, or a subclass.", "Shard plain tensors."),
    "AT225": Code(
        "The model is called past its forward, where no call can be looked at.",
        "Write what it computes in a method that is called forward.",
    ),
    "AT226": Code(
        "A parameter that the plan cuts has a hook on its gradient.",
        "Register the hook after shard, written for a rank's part.",
    ),
    "AT301": Code(
        "A layer that the plan leaves whole is given a shard of its features.",
        "Make it a row layer, or gather the output of the column layer before it.",
    ),
    "AT302": Code(
        "A row layer is given its whole input, or split_input is set for one that is split already.",
        "Put a column layer before it, or set or unset split_input.",
    ),
    "AT303": Code(
        "An op looks or moves along a dim that is sharded (softmax, norm, sort, flip, cumsum).",
        "Gather before it, or cut along another dim (whole heads).",
    ),
    "AT304": Code(
        "An op meets a shard or a partial sum, and autotp has no rule for that op there.",
        "Leave whole what reaches it.",
    ),
    "AT305": Code(
        "A value that is whole meets a shard, so that its gradient would be a part on each rank.",
        "Use it in one place, or leave whole what it meets.",
    ),
    "AT306": Code(
        "A whole value meets a shard along the dim that is cut.", "Shard what it meets too, or gather."
    ),
    "AT307": Code(
        "Two values that meet are cut differently over the ranks.",
        "Deal the same number of units (heads) to both.",
    ),
    "AT308": Code(
        "A view splits the sharded dim across the border of a unit.",
        "Say with `heads` that whole heads are dealt, or with `sections` that parts are fused.",
    ),
    "AT309": Code(
        "A split, chunk or slice cuts across the ranks' parts of a fused layer.",
        "Say its `sections` in the rule.",
    ),
    "AT310": Code(
        "A sum whose parts are still on the ranks is used as if it were whole.",
        "Let the sum be reduced first: let a row layer make it.",
    ),
    "AT311": Code(
        "The model would return a shard or a part of a sum.", "Set gather_output on the layer that makes it."
    ),
    "AT312": Code(
        "A sharded parameter of a layer is used outside of that layer's forward.",
        "Call the layer itself, give its tensor a rule with a dim, or leave it whole.",
    ),
    "AT313": Code(
        "A size or a number of the whole model is used where a rank's own is needed.",
        "Read sizes off the tensor (`x.shape`, `-1`).",
    ),
    "AT314": Code(
        "A column or vocab layer is given a shard or a part of a sum.", "Make it a row layer, or gather."
    ),
    "AT315": Code(
        "A rank with its smaller sizes runs other ops than the whole model.",
        "Let no branch depend on a size that is cut.",
    ),
    "AT316": Code(
        "A module draws random numbers both on shards and on whole values.",
        "Draw them in two modules, each of one kind.",
    ),
    "AT317": Code(
        "An in-place op would write a result into a tensor that is laid out differently.",
        "Use the op that returns a new tensor.",
    ),
    "AT318": Code(
        "A grouped product takes widths of whole 16-byte blocks, and a rank's width is none.",
        "Deal blocks by `heads`, as the finding says.",
    ),
    "AT319": Code(
        "A module that owns sharded tensors would need other mappings at its border in another call or mode.",
        "Let the module do one thing in each call, or leave its tensors whole.",
    ),
    "AT320": Code(
        "The forward cannot be traced.",
        "Pass inputs with which it runs; shapes alone can be checked without a proof.",
    ),
    "AT321": Code(
        "A tensor comes from an operation that the recorder does not see.",
        "Compute it by torch ops, or before the forward.",
    ),
    "AT322": Code(
        "No traced forward runs a layer of the plan.", "Pass inputs that run it, or leave it whole."
    ),
    "AT323": Code(
        "A gradient hook or an autograd.Function, whose backward no trace shows, meets a value that is not "
        "whole.",
        "Leave whole what reaches it.",
    ),
    "AT324": Code(
        "The forward leaves a tensor on the model, of which each rank holds its own part. A call that reads "
        "it raises.",
        "Hand it from call to call as an argument and a result.",
    ),
    "AT325": Code(
        "Modules whose forward asks for values were not looked into; what they give is whole.",
        "Nothing, unless they should be sharded.",
    ),
    "AT326": Code(
        "A module that asks for the value of a tensor cannot be traced, and something sharded is in it.",
        "Write the branch with torch.where, or leave the layers of this module whole.",
    ),
    "AT327": Code(
        "One expression of the model's code would have to be two things on a rank.",
        "Let the two uses be two expressions.",
    ),
    "AT328": Code(
        "A size that is cut is compared with a size of the input.",
        "Compare with the whole number, kept in an attribute.",
    ),
    "AT390": Code(
        "A large matrix stays whole on every rank, and no rule says so.",
        "Shard it, or accept it by `replicate`.",
    ),
    "AT391": Code("The plan shards no matrix.", "Give the large matrices a column, row or vocab rule."),
    "AT392": Code("The plan shards next to nothing.", "Give the large matrices a column, row or vocab rule."),
    "AT393": Code(
        'A large matrix stays whole under the plan "auto", for the reason that is told.',
        "Nothing, or change the line of the model that is named.",
    ),
    "AT420": Code(
        "A tensor has another shape in the checkpoint than by its config.json.",
        "Get config and weights from one place.",
    ),
}


def meaning(code: str) -> str:
    """What a code means and what to do, for one line each.

    >>> print(meaning("AT203"))
    AT203: There are fewer units (heads, rows, features) than ranks, and they cannot be shared.
      = help: Take a tp that works; kv heads may be shared where the query heads beside them are declared.

    Raises KeyError for a code that there is not.
    """
    known = CODES[code]
    return f"{code}: {known.means}\n  = help: {known.remedy}"

"""The second half of distillation for an EAGLE-3 head: its form, its first weights, and its loss.

Steps, checkpoints and texts are as for the other kind (train.py, data.py)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding

from worker_service.distill.data import Sample
from worker_service.distill.train import LATER, Features, Trainer
from worker_service.engine.drafting.eagle import EagleHead, parse_config
from worker_service.engine.shape import attention_shapes, text_config


def layers_of(model: Any) -> list[int]:
    """Whose inputs a head of ours reads: a low, a middle and a high layer, as others choose them."""
    count = text_config(model.config).num_hidden_layers
    return sorted({min(2, count), count // 2, max(count - 3, 0)})


def states(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What `model` knows at each of `tokens` [n] in those layers, and last what it chooses by: [n, layers + 1, hidden],
    flat."""
    entering: list[torch.Tensor] = []
    layers, modules = layers_of(model), [model.get_input_embeddings(), *model.base_model.layers]
    hooks = [
        modules[layer].register_forward_hook(
            lambda _, inputs, output: entering.append(output if isinstance(output, torch.Tensor) else output[0])
        )
        for layer in layers
    ]
    try:
        last = model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([*entering, last], -1)[0]


def new_eagle(model: Any, draft_ids: Sequence[int], vocabulary: str) -> EagleHead:
    """A head for `model` with the sizes of its last layer, beginning with that layer's weights where they fit."""
    config, shape = text_config(model.config), attention_shapes(model.config)[-1]
    layers = layers_of(model)
    head = EagleHead(
        parse_config(
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "llama",
                "hidden_act": "silu",
                "hidden_size": config.hidden_size,
                "intermediate_size": getattr(config, "intermediate_size", 4 * config.hidden_size),
                "num_attention_heads": shape.heads,
                "num_key_value_heads": shape.kv_heads,
                "head_dim": shape.dim,
                "num_hidden_layers": 1,
                "max_position_embeddings": config.max_position_embeddings,
                "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-5),
                "rope_theta": float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 1e4)),
                "tie_word_embeddings": False,
                "vocab_size": config.vocab_size,
                "draft_vocab_size": len(draft_ids),
                "eagle_aux_hidden_state_layer_ids": layers,
                "torch_dtype": "bfloat16",
                "laps_sd_vocabulary": vocabulary,
            }
        ),
        len(layers),
    )
    ids = torch.tensor(sorted(draft_ids))
    head.d2t.copy_(ids - torch.arange(len(ids)))
    head.t2d[ids] = True
    _initialise(head, model, ids)
    return head


@torch.no_grad()
def _initialise(head: EagleHead, model: Any, ids: torch.Tensor) -> None:
    d, last = head.fc.out_features, list(model.base_model.layers)[-1]
    for module in head.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.normal_(std=0.3 / math.sqrt(module.in_features))
    head.fc.weight[:, -d:] += torch.eye(d)  # the highest layer's state goes through
    head.lm_head.weight.copy_(model.get_output_embeddings().weight[ids])
    own, theirs = head.state_dict(), {f"midlayer.{name}": weight for name, weight in last.state_dict().items()}
    theirs["norm.weight"] = model.base_model.norm.weight
    theirs["midlayer.hidden_norm.weight"] = theirs.get("midlayer.input_layernorm.weight", own["norm.weight"])
    for name, weight in theirs.items():
        if name not in own or name == "midlayer.input_layernorm.weight":
            continue
        if own[name].shape == weight.shape:
            own[name].copy_(weight)
        elif own[name].shape == (weight.shape[0], 2 * weight.shape[-1]):  # beside the state it sees an embedding
            own[name][:, weight.shape[-1] :] = weight


@dataclass(frozen=True, slots=True)
class Texts:
    """Whole texts, one after the other, without their last tokens."""

    states: torch.Tensor  # [positions, layers * hidden]
    hidden: torch.Tensor  # [positions, hidden]: what the target chose the next token by
    tokens: torch.Tensor  # [positions]: that next token
    positions: torch.Tensor
    texts: torch.Tensor  # [positions]: which text
    learned: torch.Tensor  # [positions]: whether the next token is the target's own


class _Chains:
    """Attention of chains that begin at many positions at once: over all entries of the text up to where the chain
    begins, and over the chain's own entries, of which each call brings one more."""

    def __init__(self, counts: Sequence[int], chains: Sequence[int]) -> None:
        """`counts`: the positions of each text, all of which the first call brings. `chains`: how many of them, the
        last ones, the calls after it go on from. Texts are attended one by one: together they would take the square of
        their sum."""
        self._counts, self._chains = list(counts), list(chains)
        self._keys: list[Sequence[torch.Tensor]] = []  # of each call, by texts
        self._values: list[Sequence[torch.Tensor]] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        groups, counts = query.shape[1] // key.shape[1], self._chains if self._keys else self._counts
        self._keys.append(torch.split(key.repeat_interleave(groups, 1), counts))
        self._values.append(torch.split(value.repeat_interleave(groups, 1), counts))
        by_text = torch.split(query, counts), zip(*self._keys, strict=True), zip(*self._values, strict=True)
        return torch.cat(list(map(self._attend, *by_text)))

    @staticmethod
    def _attend(query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
        n, count = len(query), len(keys[0])
        scores = torch.einsum("ihd,jhd->ihj", query, keys[0]).float()
        later = torch.ones(n, count, dtype=torch.bool).triu(count - n + 1)
        scores = scores.masked_fill(later[:, None], -torch.inf)
        own = [(query * mine).sum(-1, keepdim=True).float() for mine in keys[1:]]
        weights = (torch.cat([scores, *own], -1) / query.shape[-1] ** 0.5).softmax(-1).to(values[0].dtype)
        result = torch.einsum("ihj,jhd->ihd", weights[..., :count], values[0])
        for number, mine in enumerate(values[1:]):
            result = result + weights[..., count + number, None] * mine
        return result


class EagleTrainer(Trainer):
    """Steps of an EAGLE-3 head, along chains of its own states as it will draft (training-time test)."""

    head: EagleHead
    reads = 8  # it learns from prompts, too, and keeps their states meanwhile

    def make_batch(self, samples: Sequence[Sample], features: Features, indices: Sequence[int]) -> Texts:
        rows = [features.of(i, 0) for i in indices]
        counts = torch.tensor([len(each) for each in rows])
        every, width = torch.cat(rows), self.head.fc.out_features
        wholes = [samples[i].prompt + samples[i].output for i in indices]
        starts = [len(samples[i].prompt) - 1 for i in indices]
        return Texts(
            states=every[:, :-width],
            hidden=every[:, -width:],
            tokens=torch.tensor([token for whole in wholes for token in whole[1:]]),
            positions=torch.cat([torch.arange(int(count)) for count in counts]),
            texts=torch.repeat_interleave(torch.arange(len(indices)), counts),
            learned=torch.cat([torch.arange(int(n)) >= start for n, start in zip(counts, starts, strict=True)]),
        )

    def _loss(self, batch: Any) -> tuple[float, torch.Tensor]:
        """Cross entropy to the target's own distribution. In step j the chain of position i has seen the tokens up to
        i + j + 1, and learns the target's choice after them. Chains begin where one of their steps has such a choice
        that is learned: of a prompt only its last positions."""
        n, learned = len(batch.tokens), batch.learned.nonzero()[:, 0]
        with torch.no_grad():
            wanted = (batch.hidden[learned].to(self._rows.dtype) @ self._rows.T).float().softmax(-1)
            row = batch.learned.cumsum(0) - 1  # of `wanted`, by position
        begins = torch.zeros(n, dtype=torch.bool)
        for earlier in range(self._unroll + 1):
            begin = (learned - earlier).clamp(min=0)
            begins[begin[batch.texts[begin] == batch.texts[learned]]] = True
        every = batch.texts.bincount().tolist()
        attend = _Chains(every, batch.texts[begins].bincount(minlength=len(every)).tolist())
        chains, losses = torch.arange(n), []
        with torch.autocast("cpu", torch.bfloat16):
            state = self.head.fc(batch.states.float()).float()
        for j in range(min(self._unroll, n - 1)):
            if j == 1:
                chains = begins.nonzero()[:, 0]
                state = state[chains]
            judged = (chains + j + 1).clamp(max=n - 1)
            counts = (batch.texts[judged] == batch.texts[chains]) & batch.learned[judged] & (chains + j + 1 < n)
            with torch.autocast("cpu", torch.bfloat16):
                embeds = embedding(batch.tokens[(chains + j).clamp(max=n - 1)], self._embeddings).float()
                state = self.head(state, embeds, batch.positions[chains] + j, attend).float()
                logits = self.head.logits(state[counts])
            loss = -(logits.float().log_softmax(-1) * wanted[row[judged[counts]]]).sum()
            losses.append(loss / counts.sum().clamp(min=1))
        total = sum((loss * LATER**j for j, loss in enumerate(losses)), torch.zeros(()))
        return float(losses[0].detach()) if losses else 0.0, total

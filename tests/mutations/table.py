"""Mutations: each breaks one initialization, scale or mask of a method, and the named tests must fail for it."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Suite(NamedTuple):
    """The tests of a method: files and folders of a default run, in their order, and the laws of these classes."""

    paths: tuple[str, ...]
    laws: str = ""


class Mutation(NamedTuple):
    """One replacement of text in a file below `src/graftlm`; `old` occurs exactly once there."""

    name: str
    suite: str
    file: str
    old: str
    new: str

    def digest(self) -> str:
        """A hash of the change, by which results are found again."""
        return hashlib.sha256("\0".join(self).encode()).hexdigest()[:12]


SUITES = {
    "neutral": Suite(
        (
            "tests/neutral_residues/test_initialization.py",
            "tests/neutral_residues/test_reference.py",
            "tests/neutral_residues",
        ),
        "(Test_neutral_residues or Test_adapter or Test_sigmoid) and llama",
    ),
    "composition": Suite(
        ("tests/composition/test_initialization.py", "tests/composition/test_reference.py", "tests/composition"),
        "(Test_composition or Test_two_models or Test_mixture) and llama",
    ),
    "routing": Suite(
        ("tests/token_routing/test_reference.py", "tests/token_routing/test_experts.py", "tests/token_routing"),
        "(Test_token_routing or Test_one_at_a_time or Test_by_states) and llama",
    ),
    "tasks": Suite(
        (
            "tests/conditional_tasks/test_initialization.py",
            "tests/conditional_tasks/test_reference.py",
            "tests/conditional_tasks/test_heads.py",
            "tests/conditional_tasks",
        ),
        "Test_conditional_tasks and (llama or bert)",
    ),
    "lora": Suite(
        (
            "tests/neutral_residues/test_initialization.py",
            "tests/token_routing/test_experts.py",
            "tests/token_routing/test_adapters.py",
        ),
        "Test_lora and llama",
    ),
    "baselines": Suite(
        ("tests/baselines/test_block_expansion.py", "tests/baselines/test_peft_graft.py"),
        "(Test_llama_pro or Test_oft or Test_osf) and llama",
    ),
    "memory": Suite(
        ("tests/memory/test_initialization.py", "tests/memory/test_reference.py", "tests/memory"),
        "Test_memory and llama",
    ),
    "loss": Suite(
        (
            "tests/neutral_residues/test_reference.py",
            "tests/training/test_target_logits.py",
            "tests/training/test_loop.py",
            "tests/training/test_upcoming.py",
        )
    ),
    "own text": Suite(
        ("tests/data/test_own_text.py", "tests/evaluation/test_divergence.py", "tests/training/test_distillation.py")
    ),
    "sampling": Suite(("tests/data/test_token_sampler.py",)),
    "near text": Suite(("tests/data/test_new_names.py", "tests/data/test_near_text.py")),
    "samplers": Suite(("tests/data/test_samplers.py",)),
    "block-state": Suite(
        ("tests/block_state/test_state_space.py", "tests/block_state/test_reference.py", "tests/block_state")
    ),
    "selector": Suite(("tests/summarize/test_selector.py",)),
    "gain": Suite(("tests/clarify/test_gain.py",)),
    "taps": Suite(("tests/backbone/test_attention_bias.py",), "Test_conditional_tasks and llama"),
}

_NEUTRAL = "grafts/neutral_residues/method.py"
_GATED = "grafts/neutral_residues/adapter.py"
_ATTENTION = "grafts/composition/attention.py"
_READOUT = "grafts/composition/readout.py"
_POLICY, _MIXTURE = "grafts/token_routing/policy.py", "grafts/token_routing/mixture.py"
_STATE, _EMBEDDERS = "grafts/token_routing/routing_state.py", "grafts/token_routing/embedders.py"
_EXPERTS, _ROUTING = "grafts/token_routing/experts.py", "grafts/token_routing/method.py"
_ADAPTERS = "grafts/token_routing/adapters.py"
_BLOCKS, _PEFT = "grafts/baselines/block_expansion.py", "grafts/baselines/peft_graft.py"
_DEEPER = "grafts/baselines/deeper_model.py"
_PEFT_CONFIG, _PEFT_MODEL = "grafts/baselines/peft_config.py", "grafts/baselines/adapted_model.py"
_MODULES, _TASKS, _HEADS = (
    "grafts/conditional_tasks/modules.py",
    "grafts/conditional_tasks/method.py",
    "grafts/heads.py",
)
_SSM, _WINDOWS = "models/block_state/state_space.py", "models/block_state/attention.py"
_MULTI_HEAD = "models/block_state/multi_head.py"
_MEMORY, _SEEN, _DELTA = "grafts/memory/method.py", "grafts/memory/window.py", "models/delta_rule.py"
_CONVOLUTION = "models/block_state/convolution.py"
_SELECTOR_HEADS, _ENCODERS = "models/sentence_selector/heads.py", "models/sentence_selector/encoders.py"

# fmt: off
MUTATIONS = [
    Mutation(*row)
    for row in [
        # Neutral residues
        ("low variance is 9/d", "neutral", _GATED, "else 1 / (width * layers)", "else 9 / width"),
        ("He's variance is 1/d", "neutral", _GATED, "variance = 2 / width if", "variance = 1 / width if"),
        ("gate of variance 1", "neutral", _GATED, "self.gate.weight.normal_(0, 1 / math.sqrt(width))", "self.gate.weight.normal_()"),
        ("output matrix not zero", "neutral", _GATED, "self.w_o.weight.zero_()", "self.w_o.weight.normal_(0, 1e-3)"),
        ("open gate starts closed", "neutral", _GATED, "self.gate.bias.fill_(1)", "self.gate.bias.fill_(-1)"),
        ("open gate starts random", "neutral", _GATED, "self.gate.weight.zero_()", "self.gate.weight.normal_()"),
        ("L1 without 1/D", "neutral", _NEUTRAL, "(l1_N * is_old_N).sum() / out_ND.shape[-1]", "(l1_N * is_old_N).sum()"),
        ("L2 for L1", "neutral", _NEUTRAL, "out_ND.float().abs().sum(-1)", "out_ND.float().square().sum(-1)"),
        ("local loss summed over layers", "neutral", _NEUTRAL, "(count * len(self.blocks)).clamp(min=1)", "count.clamp(min=1)"),
        ("local loss without alpha", "neutral", _NEUTRAL, "return self.config.alpha * total", "return total"),
        ("L1 on the new domain", "neutral", _NEUTRAL, "is_old_N = _tokens_of(call, 0)", "is_old_N = _tokens_of(call, 1)"),
        ("local loss counts padding", "neutral", _NEUTRAL, "mask_BT = mask_BT & call.token_mask", "pass"),
        ("sigmoid doubled", "neutral", _GATED, "return torch.sigmoid(scores_N1) *", "return 2 * torch.sigmoid(scores_N1) *"),
        ("gate learns the other domain", "neutral", _NEUTRAL, "labels = new[known].float()", "labels = 1 - new[known].float()"),
        ("linear unit gates the wrong product", "neutral", _GATED, "self.activation(functional.linear(x_ND, self.w_g.weight)) * inner", "self.activation(inner) * functional.linear(x_ND, self.w_g.weight)"),
        ("another domain's total", "neutral", _NEUTRAL, "columns = [1 + domain for domain in domains]", "columns = [2 - domain for domain in domains]"),
        ("capacity counts two matrices", "neutral", _NEUTRAL, "matrices = 3 if", "matrices = 2 if"),
        # Composition
        ("deviation doubled", "composition", _ATTENTION, "normal_(0, 1 / math.sqrt(linear.in_features))", "normal_(0, 2 / math.sqrt(linear.in_features))"),
        ("output projection not zero", "composition", _ATTENTION, "self.w_o.weight.zero_()", "self.w_o.weight.mul_(0.1)"),
        ("scores without 1/sqrt(K)", "composition", _ATTENTION, "is_causal=causal,", "is_causal=causal, scale=1.0,"),
        ("attention not causal", "composition", _ATTENTION, "causal = mask is None and q_BHTK.shape[2] > 1", "causal = False"),
        ("empty masks attend everywhere", "composition", _ATTENTION, "return out_BTD * visibility.non_empty[..., None].to(out_BTD.dtype)", "return out_BTD"),
        ("queries without their norm", "composition", _ATTENTION, "self.norm_head_q, self.norm_q(anchor_BTD))", "self.norm_head_q, anchor_BTD)"),
        ("keys without their norm", "composition", _ATTENTION, "self.norm_kv(self.project(states_BSA))", "self.project(states_BSA)"),
        ("keys rotated by one position more", "composition", _ATTENTION, "rotate(k_BHSK, self._rotation(self.augmenting, k_BHSK", "rotate(k_BHSK, self._rotation(self.augmenting + 1, k_BHSK"),
        ("rotary base 1,000", "composition", _ATTENTION, "_ROTARY_BASE = 10_000.0", "_ROTARY_BASE = 1_000.0"),
        ("local heads of bias 1", "composition", _ATTENTION, "_LOCAL_BIAS = 4.0", "_LOCAL_BIAS = 1.0"),
        ("norm's epsilon is 0.1", "composition", _ATTENTION, "self.norm_q = _Norm(width, eps=1e-6)", "self.norm_q = _Norm(width, eps=1e-1)"),
        ("keys of heads without their norm", "composition", _ATTENTION, "self._heads(self.w_k, self.norm_head_k, projected)", "self._heads(self.w_k, None, projected)"),
        ("heads normalized with their biases", "composition", _ATTENTION, "heads_BHTK = norm(self._split(functional.linear(x_BTD, linear.weight)))", "return norm(self._split(linear(x_BTD)))"),
        ("gate reads states of any size", "composition", _READOUT, "functional.rms_norm(states, states.shape[-1:], eps=1e-6) for states in last", "states for states in last"),
        ("gate is not zero at zero", "composition", _READOUT, "torch.expm1(", "torch.exp("),
        ("closed gate without a gradient", "composition", _READOUT, "_LEAK = 0.1", "_LEAK = 0.0"),
        ("shares do not add up to 1", "composition", _READOUT, "return shares_BKN / shares_BKN.sum(-1, keepdim=True)", "return shares_BKN"),
        ("closed gate gives log-probabilities", "composition", _READOUT, "torch.where(closed_BK1, same_BKV, mixed_BKV)", "mixed_BKV"),
        ("tokens that a model lacks are likely", "composition", _READOUT, 'value=float("-inf")', "value=0.0"),
        ("exponents without a floor", "composition", _READOUT, "_FLOOR = -80.0", "_FLOOR = -1e9"),
        ("first tokens for the last ones", "composition", "grafts/composition/method.py", "call.at_head(call.scratch[self, name].last, columns)", "call.scratch[self, name].last[:, :columns]"),
        ("states of pairs in another order", "composition", "grafts/composition/augmenting.py", '["states", layer] for layer in self._layers]', '["states", layer] for layer in sorted(self._layers)]'),
        # Token routing
        ("cosines times temperature", "routing", _POLICY, "cosines / (config.temperature or", "cosines * (config.temperature or"),
        ("negative cosine boosted", "routing", _POLICY, "torch.where(best > 0, best * boost, best / boost)", "best * boost"),
        ("bare above the threshold", "routing", _POLICY, "(best < config.threshold)", "(best > config.threshold)"),
        ("top experts not normalized", "routing", _POLICY, "normalized = values / values.sum(-1, keepdim=True)", "normalized = values"),
        ("centroids shifted", "routing", _POLICY, "centroids_Md = centroids_Md - centre_d", "centroids_Md = centroids_Md"),
        ("empty text routed", "routing", _POLICY, "return scores.masked_fill(empty, 0.0)", "return scores"),
        ("discriminant without its bias", "routing", _POLICY, " - self.biases) / self.variance", ") / self.variance"),
        ("discriminant in units of the whitened vectors", "routing", _POLICY, "self.biases) / self.variance", "self.biases)"),
        ("worst centroid of an expert", "routing", _POLICY, "scores, \"amax\")", "-scores, \"amax\")"),
        ("clusters start close together", "routing", _POLICY, "int(distances.argmax())", "int(distances.argmin())"),
        ("whitening by the variance", "routing", _POLICY, "(a * t / (a * t + (1 - a) * s_K)).sqrt()", "(a * t / (a * t + (1 - a) * s_K))"),
        ("expert's scale dropped", "routing", _MIXTURE, "own_BTR = own_BTR * scales[0]", "own_BTR = own_BTR * 1"),
        ("linear combination without the root", "routing", _MIXTURE, "own_BTR = own_BTR.sqrt()", "pass"),
        ("update one token late", "routing", _STATE, "index - generated % config.every", "index - generated % (config.every + 1)"),
        ("prompt one token longer", "routing", _STATE, "generated = index + 1 - n", "generated = index - n"),
        ("reads: prompt ignored", "routing", _STATE, "torch.where((n > 1) & (generated > 0), n - 1, b)", "b"),
        ("window one token wider", "routing", _EMBEDDERS, "last + 1 - window", "last - window"),
        ("special tokens embedded", "routing", _EMBEDDERS, "torch.isin(ids, self._special, invert=True)", "torch.ones_like(ids, dtype=torch.bool)"),
        ("running sum of earlier documents", "routing", _EMBEDDERS, "(in_document & self._not_special(new)).float()", "self._not_special(new).float()"),
        ("running sum not divided", "routing", _EMBEDDERS, "return sums / counts.clamp(min=1)", "return sums"),
        ("training on the farthest expert", "routing", _ROUTING, "one_hot(scores.argmax(-1), experts + 1)", "one_hot(scores.argmin(-1), experts + 1)"),
        ("training route from padding", "routing", _STATE, " & real[:, None, :]", ""),
        # LoRA: experts and baseline
        ("expert's alpha not over rank", "lora", _ADAPTERS, "return alpha / (rank**0.5 if peft_config.use_rslora else rank)", "return float(alpha)"),
        ("rslora's root dropped", "lora", _ADAPTERS, "rank**0.5 if peft_config.use_rslora else rank", "rank"),
        ("baseline's alpha not times rank", "lora", "grafts/baselines/method.py", '"lora_alpha": config.scale * self._rank', '"lora_alpha": config.scale'),
        ("baseline's rank from one side", "lora", "grafts/baselines/method.py", "sum(shape[-2:])", "max(shape[-2:])"),
        ("new expert's A normal", "lora", _EXPERTS, "nn.init.kaiming_uniform_(a, a=5**0.5)", "nn.init.normal_(a)"),
        ("new expert's B not zero", "lora", _EXPERTS, "torch.zeros(config.rank, sizes.outputs)", "torch.full((config.rank, sizes.outputs), 1e-3)"),
        ("new expert's alpha not over rank", "lora", _EXPERTS, "(config.alpha or config.rank) / config.rank", "(config.alpha or config.rank) / 1"),
        # Memory
        ("memory's output not zero", "memory", _MEMORY, "self.gain = nn.Parameter(torch.zeros(values))", "self.gain = nn.Parameter(torch.full((values,), 1e-3))"),
        ("memory's matrices of variance 1", "memory", _MEMORY, "normal_(0, 1 / math.sqrt(self.w_qk.in_features))", "normal_()"),
        ("heads forget in 1 to 12 windows", "memory", _MEMORY, "math.log10(128)", "math.log10(12)"),
        ("heads write all", "memory", _MEMORY, "torch.zeros(2 * self.heads)", "torch.ones(2 * self.heads)"),
        ("padding mixed into tokens", "memory", _MEMORY, "z = z * real_BT[..., None]", "z = z * 1"),
        ("tokens mixed over documents", "memory", _DELTA, "past = past * same[..., None]", "past = past * 1"),
        ("tokens of the pass before not mixed", "memory", _MEMORY, "layer.update(state, before)", "layer.update(state, 0 * before)"),
        ("no key of the token before", "memory", _MEMORY, "key_offset = min(offset + 1, len(self.mix) - 1)", "key_offset = min(offset, len(self.mix) - 1)"),
        ("keys of any length", "memory", _MEMORY, "k_BHTK=unit_length(k)", "k_BHTK=k"),
        ("state not stored", "memory", _MEMORY, "            layer.update(state, before)\n", "            pass\n"),
        ("attention window one token wider", "memory", _SEEN, "- key >= shape.window", "- key > shape.window"),
        ("sinks hidden", "memory", _SEEN, "(index[:, None] >= shape.sinks)", "(index[:, None] >= 0)"),
        ("padding taken for sinks", "memory", _SEEN, "index = key - padding_B[:, None]", "index = key[None]"),
        ("kept window one token short", "memory", _SEEN, "self.cumulative_length - self.shape.window + 1)", "self.cumulative_length - self.shape.window + 2)"),
        ("padding kept for sinks", "memory", _SEEN, "start = (self.padding - (self.dropped - old)).clamp(0, old + leaving - count)", "start = 0 * self.padding"),
        ("sinks never move", "memory", _SEEN, "return torch.where(index < self.reach, 0,", "return torch.where(index >= 0, 0,"),
        ("sinks move a block late", "memory", _SEEN, "(index - self.reach) // self.step + 1)", "(index - self.reach) // self.step)"),
        ("sinks rotated backwards", "memory", _SEEN, "torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)", "torch.cat([a * cos + b * sin, b * cos - a * sin, rest], dim=-1)"),
        ("older sinks as the newer", "memory", _SEEN, "older_block = (self.last_block(length) - 1).clamp(min=0)", "older_block = self.last_block(length)"),
        ("both forms of the sinks seen", "memory", _SEEN, "newer_hidden = (block_BT1 != last)", "newer_hidden = (block_BT1 < last - 1)"),
        ("no correction inside a chunk", "memory", _DELTA, "within.tril(-1)", "within.tril(-2)"),
        ("output without its own token", "memory", _DELTA, "attention = decays.within *", "attention = decays.within.tril(-1) *"),
        ("state decays once more", "memory", _DELTA, "whole=g[..., -1].exp()", "whole=(2 * g[..., -1]).exp()"),
        ("documents meet in a chunk", "memory", _DELTA, "within=decays.within * same_document", "within=decays.within"),
        ("documents meet over chunks", "memory", _DELTA, "decays.whole * (last == entered)", "decays.whole"),
        ("state enters another document", "memory", _DELTA, "decays.before * (document == entered[..., None])", "decays.before"),
        # Other baselines
        ("new blocks write", "baselines", _BLOCKS, "nn.init.zeros_(parameter)", "nn.init.normal_(parameter, std=1e-3)"),
        ("biases of new blocks stay", "baselines", _BLOCKS, "for parameter in block.get_submodule(paths[projection]).parameters():", "for parameter in list(block.get_submodule(paths[projection]).parameters())[:1]:"),
        ("new blocks a layer early", "baselines", _BLOCKS, "number * layers // blocks - 1", "(number * layers - 1) // blocks - 1"),
        ("new blocks share their layers' weights", "baselines", _BLOCKS, "parameter.detach().to(torch.float32, copy=True)", "parameter.detach().float()"),
        ("new blocks have the last window", "baselines", _DEEPER, "[value[layer] for layer in order]", "[*value, *value[-1:] * (len(order) - len(value))]"),
        ("new blocks leave float32 behind", "baselines", _BLOCKS, "return _cast(output, dtype)", "return output"),
        ("capacity of one layer", "baselines", _BLOCKS, "weights * layers / in_layers", "weights / in_layers"),
        ("DoRA without magnitudes", "baselines", _PEFT_CONFIG, '{"use_dora": True}', '{"use_dora": False}'),
        ("IA3 scales what the FFN writes", "baselines", _PEFT, '"feedforward_modules": outputs', '"feedforward_modules": []'),
        ("OSF's projection lost by a cast", "baselines", _PEFT_MODEL, "layer._attach_hooks(ADAPTER)", "pass"),
        ("any start accepted", "baselines", _PEFT, "_START_TOLERANCE = 1e-4", "_START_TOLERANCE = 1e4"),
        # Conditional tasks
        ("FiLM's gain added", "tasks", _MODULES, "torch.addcmul(shift, y_BTD, gain)", "shift + gain + 0 * y_BTD"),
        ("alignment modulates x alone", "tasks", _MODULES, "self.film.change(x_BTD + product, tasks)", "self.film.change(x_BTD, tasks)"),
        ("bottleneck of variance 1", "tasks", _MODULES, "std=1 / math.sqrt(width))", "std=1.0)"),
        ("bottleneck's output not zero", "tasks", _MODULES, "nn.init.zeros_(self.up.weight)", "nn.init.normal_(self.up.weight, std=1e-2)"),
        ("the bottleneck's norm ignores the task", "tasks", _MODULES, "return self.film(self.norm(x_BTD), tasks)", "return self.norm(x_BTD)"),
        ("bias across blocks", "tasks", _MODULES, "bias.masked_fill(query_block != key_block, 0)", "bias"),
        ("blocks only by their gain", "tasks", _MODULES, "return blocks + blocks * gain + shift", "return blocks * gain + shift"),
        ("every task has the first one's LoRA", "tasks", _MODULES, "torch.stack([*factors])", "torch.stack([factors[0]] * len(factors))"),
        ("B of LoRA not zero", "tasks", _MODULES, "torch.zeros(self.rank, self.outputs)", "torch.ones(self.rank, self.outputs)"),
        ("the LoRA of an added task is not like the other's", "tasks", _TASKS, "lora.a[new].copy_(lora.a[old])", "pass"),
        ("LoRAs of trained tasks train on", "tasks", _TASKS, "lora.a[len(self._fixed) :].requires", "lora.a.requires"),
        ("a Linear that reads positions has a LoRA", "tasks", "backbone/sites.py", "if size and not self.reads_positions(path):", "if size:"),
        ("task embeddings zero", "tasks", _TASKS, "torch.randn(config.task_width) for name", "torch.zeros(config.task_width) for name"),
        ("skip path without the layer before", "tasks", _TASKS, "working_BTD if before_BTD is None else working_BTD + before_BTD", "working_BTD"),
        ("loss summed over rows", "tasks", _TASKS, "count = len(losses) if", "count = 1 if"),
        ("mean pooling over padding", "tasks", _HEADS, "weights.sum(1, keepdim=True).clamp(min=1)", "weights.shape[1]"),
        ("first token may be padding", "tasks", _HEADS, "column_R = mask_RT.int().argmax(1)", "column_R = mask_RT.int().argmax(1) * 0"),
        ("span on padding", "tasks", _HEADS, "out = out.masked_fill(padding_RT[..., None], torch.finfo(out.dtype).min)", "pass"),
        ("labels summed", "tasks", _HEADS, "nats_RC.mean(-1)", "nats_RC.sum(-1)"),
        ("tagging loss over padding", "tasks", _HEADS, "nats.sum(-1) / labeled_R.clamp(min=1)", "nats.mean(-1)"),
        ("uncertainty in nats", "tasks", _HEADS, " / math.log(logits.shape[-1])", ""),
        ("scores of unlabelled tokens", "tasks", _HEADS, "values_RT.masked_fill(targets_RT == IGNORED, 0)", "values_RT"),
        ("scaled losses of numbers by their range alone", "tasks", _HEADS, "return self.unit**2 / 12", "return self.unit**2"),
        ("task embeddings of any length", "tasks", _TASKS, "nn.functional.normalize(torch.stack(vectors))", "torch.stack(vectors)"),
        ("a score serves for ever", "samplers", "data/samplers.py", "age < max(1, self.config.keep)", "True"),
        ("no floor", "samplers", "data/samplers.py", "self._due(self.config.floor / len(self.sizes))", "0"),
        ("temperature sampling by size", "samplers", "data/samplers.py", "size**alpha for", "size for"),
        ("entropy sampling without beta", "samplers", "data/samplers.py", "self._entropy[task] ** self.config.beta", "self._entropy[task]"),
        # The training loss, and biases on attention
        ("loss on the token itself", "loss", "grafted/losses.py", "logits[:, :-1].reshape", "logits[:, 1:].reshape"),
        ("logits of the targets themselves", "loss", "grafted/losses.py", "functional.pad(is_target, (0, 1))", "functional.pad(is_target, (1, 0))"),
        ("logits of all tokens", "loss", "training/distributed.py", '{"return_logits": False} if', "{} if"),
        ("other tokens' values at the output layer", "loss", "backbone/call.py", "self.selection.take(values)[None]", "self.selection.take(values.roll(1, 1))[None]"),
        ("divergence the other way round", "own text", "evaluation/scores.py", "F.kl_div(log_q, log_p,", "F.kl_div(log_p, log_q,"),
        ("divergence of padding", "own text", "evaluation/windows.py", "is_scored = labels != -100", "is_scored = labels >= -100"),
        ("header of an answer scored as sampled", "own text", "evaluation/windows.py", "first=start,\n                bytes=np.zeros(stop - start", "first=start - 1,\n                bytes=np.zeros(stop - start + 1"),
        ("new rows distil", "own text", "grafted/chunked_losses.py", "is_old_row = losses.domain == OLD_DOMAIN", "is_old_row = losses.domain != OLD_DOMAIN"),
        ("old rows replay beside distilling", "own text", "grafted/chunked_losses.py", "predictions.select(~is_old), targets, ~is_old_row", "predictions, targets, is_old_row | ~is_old_row"),
        ("a chunk's loss without its place", "loss", "grafted/chunked_losses.py", "target_loss(logits, targets[rows], totals)", "target_loss(logits, targets[: len(logits)], totals)"),
        ("gradients of the last chunk only", "loss", "grafted/chunked_losses.py", "total_gradient += gradient", "total_gradient.copy_(gradient)"),
        ("no gradients of the weights after the body", "loss", "grafted/chunked_losses.py", "parameters = self.output_layer.trainable_parameters()", "parameters = []"),
        ("the teacher's first states for all chunks", "loss", "grafted/chunked_losses.py", "taught.logits(taught.values[rows])\n        return distillation_loss", "taught.logits(taught.values[: len(logits)])\n        return distillation_loss"),
        ("the position after the batch ahead", "loss", "training/upcoming.py", "return position()", "return self._batches.state_dict()"),
        ("distils the other way round", "own text", "grafted/losses.py", "functional.kl_div(model_log_p, teacher_log_p,", "functional.kl_div(teacher_log_p, model_log_p,"),
        ("the teacher has the grafts", "own text", "grafted/chunked_losses.py", "model = self.backbone.bare_model", "model = self.backbone.model"),
        ("sampling with a checkpoint's penalties", "sampling", "data/token_sampler.py", "generation_config=GenerationConfig())", "generation_config=self._configured.generation_config)"),
        ("one seed for all batches", "sampling", "data/token_sampler.py", "self._key = (self._seed, number)", "self._key = (self._seed,)"),
        ("one random number for all calls", "sampling", "data/token_sampler.py", "(*self._key, self._calls, index)", "(*self._key, index)"),
        ("a slot shows an earlier text", "sampling", "backbone/slot_cache.py", "self._columns[: self.shown] <= self.positions[:, None]", "self._columns[: self.shown] <= self.positions[:, None] + 1"),
        ("shorter prompts begin in padding", "sampling", "backbone/slot_cache.py", "self._columns[:width] + (width - sizes)[:, None]", "self._columns[:width] + 0 * sizes[:, None]"),
        ("random numbers of a slot", "sampling", "data/slot_sampling.py", "self._uniform_NS[self._text_B[rows], column]", "self._uniform_NS[rows % len(self._uniform_NS), column]"),
        ("tokens outside of top_p", "sampling", "data/token_drawing.py", "cumulative_BV - p_BV < self.top_p", "cumulative_BV < 2"),
        ("user's turn without its end", "own text", "data/own_text_sampling.py", "before + turn + after[1:]", "before + turn[:-1] + after[1:]"),
        ("openings with names", "near text", "data/near_text.py", "if match.end() > limit or", "if"),
        ("text about new things is kept", "near text", "data/near_text.py", "elif self._names.leave_out(asked):", "elif False:"),
        ("answers about asked things are kept", "near text", "data/new_names.py", " or _has_name(words_of(answer), self.asked)", ""),
        ("all names of answers count", "near text", "data/new_names.py", "_has_name(words_of(answer), self.asked)", "_has_name(words_of(answer), self.told)"),
        ("known words beside unknown names count", "near text", "data/new_names.py", "if any(self._is_unknown(name) for name in names):", "if False:"),
        ("unfinished questions are answered", "near text", "data/near_text.py", "turn[-1] != after[0]", "False"),
        ("questions left out for their answers are forgotten late", "near text", "data/near_text.py", "self._in_batch = []\n        generator", "generator"),
        ("the question is predicted", "near text", "data/near_text.py", "[] if reason else [(begin, len(ids))]", "[] if reason else [(1, len(ids))]"),
        ("loss over ignored targets", "loss", "grafted/losses.py", "(targets != IGNORED).sum() if totals", "(targets != 0).sum() if totals"),
        ("bias without the causal offset", "taps", "backbone/attention_bias.py", ".tril(keys - queries)", ".tril()"),
        ("bias opens hidden keys", "taps", "backbone/attention_bias.py", "return torch.where(mask, bias, torch.finfo(bias.dtype).min)", "return bias"),
        # Block-state transformers
        ("step sizes from 0.1 to 1", "block-state", _SSM, "math.log(1e-3), math.log(1e-1)", "math.log(1e-1), math.log(1.0)"),
        ("decay of 2", "block-state", _SSM, "self.log_decay.fill_(math.log(0.5))", "self.log_decay.fill_(math.log(2.0))"),
        ("frequencies without pi", "block-state", _SSM, "math.pi * torch.arange(self.shape[-1])", "torch.arange(self.shape[-1])"),
        ("outputs of variance 1", "block-state", _SSM, "self.c.normal_(std=math.sqrt(0.5))", "self.c.normal_(std=1.0)"),
        ("no zero-order hold", "block-state", _SSM, "b = (torch.exp(log_a) - 1) / a", "b = torch.exp(log_a) / a"),
        ("half of the real part", "block-state", _SSM, 'y = 2 * torch.einsum("bmep,cmep->bmec"', 'y = torch.einsum("bmep,cmep->bmec"'),
        ("no direct path", "block-state", _CONVOLUTION, "kernel[..., :1] + d_CE[..., None]", "kernel[..., :1]"),
        ("initial state decays once", "block-state", _SSM, "torch.exp(log_a * lengths_B[:, None, None, None])", "torch.exp(log_a)"),
        ("kernel's energy halved", "block-state", _SSM, "/ (2 * alpha)", "/ alpha"),
        ("kernel network of variance 1", "block-state", _SSM, "normal_(std=self.outer.in_features**-0.5)", "normal_()"),
        ("circular convolution", "block-state", _CONVOLUTION, "size = 2 * length", "size = length"),
        ("scan of pairs with the decay of one chunk", "block-state", _CONVOLUTION, "scan_chunks(pairs, factor_EQ.square(), initial)", "scan_chunks(pairs, factor_EQ, initial)"),
        ("segments continue the first chunk's state", "block-state", _CONVOLUTION, "weights.factor[:, None], before_EBnP[:, :, -1]", "weights.factor[:, None], before_EBnP[:, :, 0]"),
        ("frequencies of HiPPO doubled", "block-state", _SSM, "torch.outer(root, root) / 2", "torch.outer(root, root)"),
        ("scores without their scale", "block-state", _MULTI_HEAD, "(q / math.sqrt(q.shape[-1])) @ k", "q @ k"),
        ("banded scores by the whole width", "block-state", _WINDOWS, "math.sqrt(q_BGd.shape[-1] / self.num_heads)", "math.sqrt(q_BGd.shape[-1])"),
        ("states see one token ahead", "block-state", _MULTI_HEAD, "position <= position[:, None]", "position <= position[:, None] + 1"),
        ("span one token wider", "block-state", _WINDOWS, "visible = (distance < self.span)", "visible = (distance <= self.span)"),
        ("a step sees an empty buffer", "block-state", _WINDOWS, "present = distance <= grid.past_counts[:, None]", "present = distance <= grid.past_counts[:, None] + self.span"),
        ("recurrent gate reversed", "block-state", "models/block_state/context.py", "gate = torch.sigmoid(self.gate)", "gate = 1 - torch.sigmoid(self.gate)"),
        ("weights of variance 1", "block-state", "models/block_state/model.py", "normal_(std=self.config.initializer_range)", "normal_(std=1.0)"),
        ("a quarter of the buckets exact", "block-state", _WINDOWS, "exact = buckets // 2", "exact = buckets // 4"),
        # Selecting and clarifying
        ("document mean over padding", "selector", _SELECTOR_HEADS, "/ weights.sum(1)", "/ weights.shape[1]"),
        ("pointer on padding", "selector", _SELECTOR_HEADS, 'scores_BN.masked_fill(~mask_BN, float("-inf"))', "scores_BN"),
        ("sinusoids to 1/1,000", "selector", _ENCODERS, "-math.log(10_000) / width", "-math.log(1_000) / width"),
        ("sentences attend to padding", "selector", _ENCODERS, "src_key_padding_mask=~mask_BN", "src_key_padding_mask=None"),
        ("gain in nats", "gain", "pipelines/clarify/gain.py", "np.log2(given) - np.log2(mixture_Y)", "np.log(given) - np.log(mixture_Y)"),
        ("likelihoods normalized together", "gain", "pipelines/clarify/gain.py", "softmax(np.asarray(nats_KY, dtype=np.float64), axis=1)", "softmax(np.asarray(nats_KY, dtype=np.float64))"),
    ]
]
# fmt: on

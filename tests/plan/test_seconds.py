"""The model of seconds adds up its parts, and devices have their figures. Nothing is timed."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import transformers
from torch import nn

from hf_muon import MuonConfig, route_parameters
from hf_muon.plan import devices
from hf_muon.plan.calls import Call, Operand, Product
from hf_muon.plan.costs import attention_flops, model_flops
from hf_muon.plan.devices import device_named, known_devices
from hf_muon.plan.memory import Training
from hf_muon.plan.recorded_step import record_step
from hf_muon.plan.seconds import auto_dtype, overlapped, plan_seconds, queued, training_seconds
from hf_muon.plan.step_plan import plan_step
from hf_muon.plan.this_machine import ThisMachine, measure_this_machine
from tests.plan.plan_cases import llama

H100 = device_named("h100")
BF16, FP16 = torch.bfloat16, torch.float16

GPT2 = transformers.GPT2Config(vocab_size=50304)
LLAMA_405B = transformers.LlamaConfig(
    hidden_size=16384,
    intermediate_size=53248,
    num_hidden_layers=126,
    num_attention_heads=128,
    num_key_value_heads=8,
    vocab_size=128256,
)
MOONLIGHT = transformers.DeepseekV3Config(
    hidden_size=2048,
    intermediate_size=11264,
    moe_intermediate_size=1408,
    num_hidden_layers=27,
    n_routed_experts=64,
    num_experts_per_tok=6,
    n_shared_experts=2,
    num_attention_heads=16,
    num_key_value_heads=16,
    q_lora_rank=None,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    vocab_size=163840,
)


def product(batch=1, m=128, n=128, k=128, dtype=BF16):
    shapes = ((batch, m, k), (batch, k, n), (batch, m, n))
    return Product(tuple(Operand(s, (s[1] * s[2], s[2], 1)) for s in shapes), dtype)


def modelled(model, device=H100, layout="single", ranks=1, dtype=BF16, **options):
    config = MuonConfig.from_mapping(options)
    plan = plan_step(model, config, layout, ranks, dtype=dtype, ns_dtype=auto_dtype(device))
    return plan, plan_seconds(model, config, plan, device, dtype=dtype)[0]


class TestDevices:
    def test_every_figure_has_a_source(self):
        for name, device in known_devices().items():
            figures = {field.name for field in dataclasses.fields(device)} - {"name", "auto", "sources"}
            assert figures == device.sources.keys(), name
            assert all(device.sources.values())

    @pytest.mark.parametrize("name", ["H100", "h100", "RTX 4090", "rtx4090", "4090", "A100-80GB", "a100", "MI300X"])
    def test_names_in_any_case(self, name):
        assert device_named(name) in known_devices().values()

    def test_unknown(self):
        with pytest.raises(ValueError, match=r"device=v100 is not known\. Known devices: a100-40gb, .*, rtx-4090"):
            device_named("v100")

    def test_rates_are_dense_and_accumulate_in_fp32(self):
        for device in known_devices().values():
            assert device.rates["fp16"] == device.rates["bf16"] >= 1.9 * device.rates["tf32"]
        assert device_named("rtx-4090").rates["fp16"] == 2 * device_named("rtx-4090").rates["fp32"]
        assert [name for name, device in known_devices().items() if device.auto == "bf16"] == ["mi300x"]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"speed": 1}, r"missing or unknown are \['speed'\]"),
            ({"bandwidth": 0}, r"expected more than 0 for \['bandwidth'\]"),
            ({"gemm": 1.2}, r"shares are at most 1, and \['gemm'\] are not"),
            ({"rates": {"fp32": 1}}, "rates of fp16, bf16, fp32 and fp64"),
            ({"sources": {"rates": "somewhere"}}, "no source for"),
        ],
    )
    def test_a_bad_entry_is_refused(self, changes, message):
        content = devices._file()
        with pytest.raises(ValueError, match=f"devices.yaml, new: {message}"):
            devices._device("new", {**content["devices"]["h100"], **changes}, content["assumed"])

    def test_a_product_that_fills_the_device_takes_its_flops_at_the_share_of_the_peak(self):
        full = product(batch=H100.processors, m=1024, n=1024, k=2048)
        assert H100.product_seconds(full) == pytest.approx(full.flops / (H100.rates["bf16"] * 1e12 * H100.gemm))
        one = product(m=1024, n=1024, k=8192)  # 64 tiles
        assert H100.product_seconds(one) == pytest.approx(
            one.flops / (H100.rates["bf16"] * 1e12 * H100.gemm) * H100.processors / 64
        )

    def test_a_product_takes_no_less_than_its_bytes_or_a_kernel(self):
        flat = product(batch=4096, m=128, n=128, k=16)
        assert H100.product_seconds(flat) == H100.traffic_seconds(flat.nbytes)
        assert H100.product_seconds(product()) == H100.kernel

    def test_fp32_products_have_the_rate_of_fp32(self):
        large = {dtype: H100.product_seconds(product(512, 1024, 1024, 1024, dtype)) for dtype in (BF16, torch.float32)}
        assert large[torch.float32] / large[BF16] == pytest.approx(989.4 * 0.803 / (66.9 * 0.8))

    def test_units_of_traffic_wire_and_bus(self):
        assert H100.traffic_seconds(3350e9 * 0.85) == pytest.approx(1)
        assert H100.bus_seconds(63e9 * 0.8) == pytest.approx(1)
        assert H100.wire_seconds(1e9, 1) == 0
        assert H100.wire_seconds(450e9 * 0.82, 8) == pytest.approx(1)
        # To 8 of 15 others, on other nodes.
        assert H100.wire_seconds(50e9 * 0.9 * 15 / 8, 16) == pytest.approx(1)


class TestTheModel:
    def test_a_step_of_small_kernels_takes_the_hosts_time(self):
        calls = [Call("add", 1, 1000)] * 500
        assert queued(calls, H100) == pytest.approx(500 * H100.launch + H100.kernel)

    def test_a_step_of_large_kernels_takes_the_devices_time(self):
        calls = [Call("add", 1, 10**10)] * 500
        assert queued(calls, H100) == pytest.approx(H100.launch + 500 * H100.traffic_seconds(1e10))

    def test_the_device_waits_for_what_is_launched_late(self):
        long, short = Call("add", 1, 10**10), Call("add", 1, 0)
        both = [short] * 100 + [long], [long] + [short] * 100
        late, early = (queued(calls, H100) for calls in both)
        assert late > early
        assert max(late, early) <= sum(H100.call_seconds(call) + H100.launch for call in both[0])

    def test_moves_overlap_but_for_one_turn(self):
        assert overlapped(10.0, (0.0, 0.0), 5) == 10
        assert overlapped(10.0, (5.0, 0.0), 5) == pytest.approx(10 + 1)
        assert overlapped(10.0, (20.0, 5.0), 5) == pytest.approx(16 + 4 + 1)
        assert overlapped(10.0, (5.0, 0.0), 1) == 15
        turns = [overlapped(10.0, (8.0, 3.0), n) for n in range(1, 20)]
        assert all(a > b for a, b in itertools.pairwise(turns))

    def test_parts_and_total(self):
        _, seconds = modelled(llama())
        assert max(seconds.launching, seconds.products, seconds.elementwise) < seconds.computing == seconds.total
        assert seconds.total <= seconds.launching + seconds.products + seconds.elementwise
        assert seconds.launching == pytest.approx(seconds.launches * H100.launch)
        assert seconds.share(9 * seconds.total) == pytest.approx(0.1)

    def test_more_layers_take_longer_and_faster_devices_do_not(self):
        steps = [modelled(llama(layers))[1] for layers in (32, 64, 128)]
        assert all(a.products < b.products and a.total < b.total for a, b in itertools.pairwise(steps))
        model, slow = llama(128), steps[-1]
        for field in ("bandwidth", "processors"):
            fast = dataclasses.replace(
                H100, **{field: 2 * getattr(H100, field), "rates": {k: 2 * v for k, v in H100.rates.items()}}
            )
            assert modelled(model, fast)[1].total <= slow.total
        assert modelled(model, dataclasses.replace(H100, launch=H100.launch / 2))[1].total < slow.total

    def test_products_are_those_that_the_device_takes(self):
        """Check that NVIDIA's take fp16 and the Gram form, and AMD's bf16 and the standard form."""
        config, model = MuonConfig(), llama(head_dim=256)
        flops = {}
        for name in ("h100", "mi300x"):
            plan = plan_step(model, config, "single", 1, dtype=BF16, ns_dtype=auto_dtype(device_named(name)))
            seconds, _ = plan_seconds(model, config, plan, device_named(name), dtype=BF16)
            routes = route_parameters(model, config)
            recorded = record_step(routes, config, dtype=BF16, ns_dtype=auto_dtype(device_named(name)))
            assert {call.product.dtype for call in recorded.calls if call.product} == {auto_dtype(device_named(name))}
            assert seconds.launches == recorded.launches
            flops[name] = recorded.flops
            assert flops[name] == plan.flops[0]
        assert flops["h100"] < flops["mi300x"]

    @pytest.mark.extended(but="gpt2")
    @pytest.mark.parametrize(
        ("config", "layout", "ranks", "tokens", "least", "most"),
        [
            pytest.param(GPT2, "single", 1, 2**19, 0.003, 0.007, id="gpt2"),
            pytest.param(LLAMA_405B, "fsdp", 1024, 2**24, 0.002, 0.005, id="llama-405b"),
            pytest.param(MOONLIGHT, "fsdp", 256, 2**23, 0.01, 0.03, id="moonlight"),
        ],
    )
    def test_shares_are_near_those_that_are_reported(self, config, layout, ranks, tokens, least, most):
        """Check the docs' comparison with Keller Jordan's bounds, and with Moonlight's 1 to 3 %."""
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        plan, seconds = modelled(model, H100, layout, ranks, torch.float32)
        training = training_seconds(model, plan, H100, tokens, Training(1, 1024 if ranks == 1 else 8192))
        assert least < seconds.total / training < most

    def test_ranks_add_the_wire_and_divide_the_products(self):
        model = llama(4)
        _, alone = modelled(model)
        plan, seconds = modelled(model, layout="fsdp", ranks=4)
        assert seconds.products < alone.products
        config = MuonConfig()
        recorded = [record_step(route_parameters(model, config), config, "fsdp", 4, r, dtype=BF16) for r in range(4)]
        busiest = recorded[max(range(4), key=plan.flops.__getitem__)]
        sending = H100.wire_seconds(max(plan.sent_bytes), 4) + busiest.collectives * H100.collective
        assert seconds.wire == pytest.approx(sending)
        assert seconds.total > seconds.computing
        away = dataclasses.replace(H100, node=2)
        assert modelled(model, away, "fsdp", 4)[1].wire > seconds.wire

    def test_offloaded_moments_add_the_bus(self):
        plan, seconds = modelled(llama(4), momentum_offload="cpu")
        moved = plan.memory.to_device[0] + plan.memory.to_host[0]
        assert seconds.bus == pytest.approx(H100.bus_seconds(moved))
        assert modelled(llama(4))[1].total < seconds.total

    @pytest.mark.parametrize("offload", ["params", "optimizer"])
    def test_state_that_a_framework_keeps_on_the_host_is_refused(self, offload):
        model, layout = llama(), "zero3"
        plan = plan_step(model, MuonConfig(), layout, 2, training=Training(offload=offload))
        with pytest.raises(ValueError, match=f"device=NVIDIA H100 SXM with offload={offload}: .* Leave one"):
            plan_seconds(model, MuonConfig(), plan, H100, offload=offload)

    def test_forward_and_backward(self):
        model = llama()
        plan, _ = modelled(model)
        per_token = model_flops(model) + attention_flops(model, 1024)
        assert attention_flops(model, 1024) == 6 * 2 * 256 * 1024
        assert attention_flops(nn.Linear(3, 3), 1024) == 0
        seconds = training_seconds(model, plan, H100, 10**6, Training(1, 1024))
        assert seconds == pytest.approx(per_token * 1e6 / (989.4e12 * 0.4))
        again = training_seconds(model, plan, H100, 10**6, Training(1, 1024, gradient_checkpointing=True))
        assert again == pytest.approx(seconds * 4 / 3)


class TestThisMachine:
    MACHINE = ThisMachine(
        name="a CPU",
        products={product(1, 64, 64, 64): 1e-5, product(1, 512, 512, 512): 2e-3},
        traffic=[(1000, 4e-11), (10**6, 2e-11), (10**9, 1e-10)],
        launch=5e-6,
        peak=1e11,
        auto="fp32",
    )

    def test_measured_products_take_what_was_measured_and_others_the_rate_of_the_nearest(self):
        assert self.MACHINE.product_seconds(product(1, 64, 64, 64)) == 1e-5
        assert self.MACHINE.product_seconds(product(1, 64, 64, 128)) == pytest.approx(2e-5)
        assert self.MACHINE.product_seconds(product(2, 512, 512, 512)) == pytest.approx(4e-3)

    def test_products_of_every_kind_are_measured(self):
        """Measure with and without a batch and an addend; that nothing is negative is all that is known."""
        shapes = (32, 48), (48, 16), (32, 16), (32, 16)
        operands = [tuple(Operand((*b, *s), (*[s[0] * s[1]] * len(b), s[1], 1)) for s in shapes) for b in ((), (3,))]
        products = [Product(own[:count], torch.float32) for own in operands for count in (3, 4)]
        machine = measure_this_machine([Call("product", 1, 0, product) for product in products])
        assert machine.products.keys() == set(products)
        assert min(*machine.products.values(), machine.launch, machine.peak) > 0

    def test_traffic_is_interpolated_between_sizes(self):
        seconds = self.MACHINE.traffic_seconds
        assert [seconds(10.0**e) / 10.0**e for e in (2, 3, 6, 9, 12)] == pytest.approx(
            [4e-11, 4e-11, 2e-11, 1e-10, 1e-10]
        )
        assert 2e-11 < seconds(10**7) / 1e7 < 1e-10
        assert seconds(0) == 0

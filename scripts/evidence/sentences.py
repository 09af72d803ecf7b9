"""The sentences of pages that give numbers of the records; `scripts.evidence.numbers` finds and writes them."""

from functools import partial
from statistics import mean, median

from scripts.evidence.facts import (
    BFLOAT16,
    GRAPHS,
    LARGER_IN_PLACE,
    LARGER_RECOMPUTED,
    LITE0,
    SHORT,
    TRAINED,
    WIDE,
    ablation,
    arm,
    at_equal_time,
    both_regimes,
    compared,
    in_block,
    limit,
    longer,
    most,
    ms,
    of_memory,
    of_quality,
    on_h100,
    on_h200,
    over_networks,
    over_shapes,
    recomputed_norms,
    record,
    restored,
    restoring,
    row,
    runs,
    scores,
    single,
    sized,
    spread,
    synchronised,
    tiles,
)
from scripts.evidence.numbers import Sentence
from scripts.reports.markdown import GIB, MIB

SENTENCES: dict[str, list[Sentence]] = {
    "README.md": [
        Sentence("EfficientNet-Lite0: [{:.1f} mIoU]", lambda: scores("camvid/picture/inplace")),
        Sentence(
            "without CUDA graphs | {:.1f} GiB | {:.1f} GiB |",
            lambda: [on_h100(norms, BFLOAT16)["peak_bytes"] / GIB for norms in ("standard", "in-place")],
        ),
        Sentence(
            "time, without CUDA graphs | {:.0f} ms | {:.0f} ms |",
            lambda: [ms(on_h100(norms, BFLOAT16)) for norms in ("standard", "in-place")],
        ),
        Sentence(
            "reserved memory, with CUDA graphs | {:.1f} GiB | {:.1f} GiB |",
            lambda: [on_h100(norms, BFLOAT16, GRAPHS)["reserved_bytes"] / GIB for norms in ("standard", "in-place")],
        ),
        Sentence(
            "the memory is {:.2f} of the baseline's peak for ResNet-50 and {:.2f} for DenseNet-121",
            lambda: [on_h200(network, "checkpoint per block", "peak_bytes") for network in ("resnet50", "densenet121")],
        ),
        Sentence(
            "the default on one GPU | {:.0f} ms | {:.0f} ms |",
            lambda: [ms(on_h100(norms, BFLOAT16, GRAPHS)) for norms in ("standard", "in-place")],
        ),
        Sentence(
            "| ResNet-50, without and with CUDA graphs | {:.2f} and {:.2f} | {:.2f} and {:.2f} |",
            lambda: [*both_regimes("resnet50")],
        ),
        Sentence(
            "| DenseNet-121, without and with CUDA graphs | {:.2f} and {:.2f} | {:.2f} and {:.2f} |",
            lambda: [*both_regimes("densenet121")],
        ),
        Sentence(
            "| median of {:.0f} image networks | {:.2f} | {:.2f} |",
            compared,
        ),
        Sentence("| median of {:.0f} transformers | {:.2f} | {:.2f} |", lambda: compared("transformers")),
        *(
            Sentence(
                f"| {name} | {{:.0f}} MiB | {{:.1f}} ± {{:.1f}} |",
                partial(of_memory, run),
            )
            for name, run in (
                ("standard norms", "std"),
                ("in-place ABN, larger crops", "inplace_larger_crops"),
                ("recomputed activations, larger crops", "recompute_larger_crops"),
                ("standard norms, more steps", "std_equal_time"),
            )
        ),
        Sentence("takes {:.1f} times as long", lambda: (on_h200("resnet50", "save_on_cpu"),)),
    ],
    "docs/keepless.md": [
        Sentence(
            "about [{:.2f} of the baseline's](results/networks.md), in {:.2f} times the time on a CPU, {:.2f} "
            "(ResNet-50) to {:.2f} (DenseNet-121) on an H200",
            lambda: (
                median(over_networks("recompute_activations", "peak_bytes")),
                median(over_networks("recompute_activations")),
                on_h200("resnet50", "recompute_activations"),
                on_h200("densenet121", "recompute_activations"),
            ),
        ),
        Sentence(
            "five transformers is {:.2f} to {:.2f} of the baseline's, where checkpointing every block reaches {:.2f} "
            "to {:.2f}",
            lambda: [
                fold(over_networks(method, "peak_bytes", "transformers"))
                for method in ("recompute_activations", "checkpoint per block")
                for fold in (min, max)
            ],
        ),
        Sentence("takes {:.2f} of the baseline's time, checkpointing {:.2f}", lambda: compared("transformers")[:0:-1]),
    ],
    "docs/memory.md": [
        Sentence(
            "saves {:,.0f} bytes per input pixel with standard norms, {:,.0f} with any other strategy, and {:.0f} with",
            lambda: (
                in_block("bodies", "| standard | std | {} |"),
                in_block("bodies", "| in-place ABN II | inplace | {} ("),
                in_block("recomputation", "| inplace | sqrt | {} ("),
            ),
        ),
        Sentence(
            "keeps {:.2f} of the baseline's activation memory (median of {:.0f} networks; peak with gradients {:.2f}) "
            "and takes {:.2f} times",
            lambda: [
                median(over_networks("recompute_activations", "kept_bytes")),
                len(over_networks("recompute_activations")),
                *(median(over_networks("recompute_activations", key)) for key in ("peak_bytes", "times_ms")),
            ],
        ),
        Sentence(
            "in [{:.2f} times their time](results/steps.md)",
            lambda: (recomputed_norms(),),
        ),
    ],
    "docs/results/README.md": [
        Sentence(
            "DeepLabV3 saves {:,.0f} bytes per input pixel for the backward pass, instead of {:,.0f},",
            lambda: (
                in_block("bodies", "| in-place ABN II | inplace | {} ("),
                in_block("bodies", "| standard | std | {} |"),
            ),
        ),
        Sentence(
            "fits {:.0f} crops into 12 GiB, instead of {:.0f}.",
            lambda: (most("h100", "resnext101/inplace"), most("h100", "resnext101/std")),
        ),
        Sentence(
            "step takes {:.0f} ms, instead of {:.0f} with cuDNN",
            lambda: [ms(on_h100(norms, BFLOAT16)) for norms in ("in-place", "standard")],
        ),
        Sentence(
            "with CUDA graphs, {:.0f} ms instead of {:.0f}. On CPUs",
            lambda: [ms(on_h100(norms, BFLOAT16, GRAPHS)) for norms in ("in-place", "standard")],
        ),
        Sentence(
            "step takes {:.2f} times the time of no saving (median of {:.0f} image networks, CPU); checkpointing takes "
            "{:.2f}.",
            lambda: (compared().planned, compared().networks, compared().checkpointed),
        ),
        Sentence(
            "ResNet-50 takes {:.2f} against {:.2f}, DenseNet-121 {:.2f} against {:.2f}.",
            lambda: [
                on_h200(network, method)
                for network in ("resnet50", "densenet121")
                for method in ("peak of the checkpoints", "checkpoint per block")
            ],
        ),
        Sentence("Five transformers on a CPU take {:.2f} and {:.2f}.", lambda: compared("transformers")[:0:-1]),
        Sentence(
            "Tiny networks on a GPU, with an earlier version, exceeded budgets by up to {:.1f} %",
            lambda: [in_block("kept", "are at most {}% above budgets")],
        ),
        Sentence(
            "tiled loss takes 1/{:.0f} of the memory and {:.2f} of the time of upsampling all logits ({:.2f} with "
            "bootstrapping)",
            lambda: (
                row("steps/loss", "cpu", f"{WIDE}, cross-entropy", way="whole logits")["peak_bytes"]
                / row("steps/loss", "cpu", f"{WIDE}, cross-entropy", way="tiles")["peak_bytes"],
                tiles("cross-entropy"),
                tiles("bootstrapped, 25 %"),
            ),
        ),
        Sentence(
            "in-place norms reach {:.1f} ± {:.1f} mIoU (two seeds) instead of {:.1f} ± {:.1f};",
            lambda: (*spread("camvid/table3/inplace_fixed_batch"), *spread("camvid/table3/std")),
        ),
        Sentence(
            "recomputed activations {:.1f} and in-place norms {:.1f} ± {:.1f} instead of {:.1f}.",
            lambda: (
                mean(scores(f"{TRAINED}/recompute_larger_crops")),
                *spread(f"{TRAINED}/inplace_larger_crops"),
                mean(scores(f"{TRAINED}/std")),
            ),
        ),
        Sentence(
            "an H100 allocated {:.0f} and {:.0f} MiB instead of {:.0f}.",
            lambda: [
                mean(runs(f"{TRAINED}/{name}", "training", "peak_memory_mib"))
                for name in ("recompute_larger_crops", "inplace_larger_crops", "std")
            ],
        ),
        Sentence(
            "larger ones on a CPU reach {:.1f}; from scratch", lambda: (mean(scores(f"{TRAINED}/std_equal_time")),)
        ),
        Sentence(
            "{:.2f} against {:.2f} %, one run each",
            lambda: single("cifar/table3/revnet38", "cifar/table3/resnet32", key="top1"),
        ),
        Sentence("point at most {:.2f} degrees away", lambda: (max(restored("bfloat16", "angle")),)),
        Sentence(
            "networks-with-standard-norms): {:.2f} and {:.2f} GiB of tensors on each, where {:.2f} are left",
            lambda: (limit("ResNeXt-152", "peak"), limit("WideResNet-38", "peak"), limit("ResNeXt-152", "left")),
        ),
        Sentence(
            "row of 512 images ({:.2f} GiB)",
            lambda: (row("memory_plan", "all", "experiments/table2/resnext101_inplace_512")["peak"] / GIB,),
        ),
        Sentence(
            "measured: {:.0f} instead of {:.0f} images, and {:.0f} with 602 layers",
            lambda: (most("h100", "RevNet-104/std"), most("h100", "ResNet-101/std"), most("h200", "RevNet-602/std")),
        ),
        Sentence(
            "here {:.2f} by [images per second]",
            lambda: (
                runs("cifar/table3/resnet32", "training", "images_per_second")[0]
                / runs("cifar/table3/revnet38", "training", "images_per_second")[0],
            ),
        ),
        Sentence(
            "checkpointing takes {:.1f} % more time than standard norms, in-place ABN I {:.1f} % (CPU); {:.1f} and "
            "{:.1f} % with unfused operators on a CPU; {:.1f} and {:.1f} % on an H100",
            lambda: [
                *(
                    over_shapes(each, call)
                    for call in ("cpu", "cpu_eager")
                    for each in ("checkpointing", "in-place ABN I")
                ),
                *(in_block("kept", words) for words in ("checkpointing (b) +{}", "in-place I +{}")),
            ],
        ),
        Sentence("[{:.2f} times](cifar.md#from-stored", lambda: (restoring(),)),
    ],
    "docs/results/networks.md": [
        Sentence(
            "a step takes {:.2f} times as long as without saving, and checkpointing takes {:.2f}** (medians of {:.0f}",
            lambda: (compared().planned, compared().checkpointed, compared().networks),
        ),
        Sentence("Five transformers take {:.2f} and {:.2f}. On", lambda: compared("transformers")[:0:-1]),
        Sentence(
            "ResNet-50 in bfloat16 takes {:.2f} and {:.2f}. Without",
            lambda: [on_h200("resnet50", method) for method in ("peak of the checkpoints", "checkpoint per block")],
        ),
        Sentence(
            "keeps {:.2f} of the activation memory for {:.2f} times",
            lambda: [median(over_networks("recompute_activations", key)) for key in ("kept_bytes", "times_ms")],
        ),
    ],
    "docs/results/camvid.md": [
        Sentence(
            "it scores {:.2f} against {:.2f} mIoU. The",
            lambda: single("camvid/samplers/class_uniform", "camvid/samplers/uniform"),
        ),
        Sentence(
            "planner estimates {:.0f} MiB for standard norms, {:.0f} for more crops and {:.0f} for larger",
            lambda: [
                row("memory_plan", "all", f"experiments/camvid_table3/{name}")["by_tiles"] / MIB
                for name in ("std", "inplace_fixed_crop", "inplace_fixed_batch")
            ],
        ),
        Sentence(
            "helped most**: {:.1f} ± {:.1f} mIoU (two seeds) against {:.1f} ± {:.1f} with standard",
            lambda: (*spread("camvid/table3/inplace_fixed_batch"), *spread("camvid/table3/std")),
        ),
        Sentence("of seeds: {:.1f} ± {:.1f}. With larger", lambda: spread("camvid/table3/inplace_fixed_crop")),
        Sentence(
            "{:.1f} points ({:.1f} and {:.1f} against {:.1f} and {:.1f}; 0.5 in",
            lambda: synchronised(),
        ),
        Sentence(
            "(fixed crop: {:.1f}, {:.1f}, {:.1f}). **Class-uniform sampling**",
            lambda: scores("camvid/table3/inplace_fixed_crop"),
        ),
        Sentence("ends at {:.2f} ± {:.2f} mIoU (`lite0`,", lambda: spread(LITE0)),
        Sentence("three seeds; {:.0f}, {:.0f} and {:.0f} minutes on", lambda: runs(LITE0, "training", "minutes")),
        Sentence("(above) scores {:.2f}. From random", lambda: single("camvid/norms/inplace")),
        Sentence("network scores {:.2f}. - Publications", lambda: single("camvid/finetune/random")),
        Sentence("it scores {:.2f} ± {:.2f} (`results_test.json` of", lambda: spread(LITE0, "results_test")),
        Sentence("| against {:.2f} |", lambda: single(SHORT)),
        *(
            Sentence(f"| {change} | {{:.2f}} | {{:+.1f}} |", partial(ablation, name))
            for change, name in (
                ("random weights", "random"),
                ("stride 16", "stride16"),
                ("the head at the body's learning rate", "equal_head"),
                ("half the learning rate", "half_rate"),
                ("in-place norms with leaky ReLU", "inplace"),
                ("leaky ReLU in place of ReLU6, as in-place norms need", "leaky_relu"),
                ("no weight decay", "no_decay"),
                ("ImageNet's colours instead of the weights' own", "imagenet_colours"),
                ("running statistics with momentum 0.01 instead of 0.1", "momentum"),
            )
        ),
        *(
            Sentence(f"{words} | {{:.0f}} | {{:.0f}} | {{:.1f}} | {{:.2f}} ± {{:.2f}} |", partial(arm, name))
            for words, name in (
                ("| standard norms | 240²", "std"),
                ("ReLU | 352²", "inplace_larger_crops"),
                ("activations | 376²", "recompute_larger_crops"),
                ("time: standard norms | 240²", "std_equal_time"),
                ("norms | 352²", "std_crop_352"),
                ("norms | 376²", "std_crop_376"),
            )
        ),
        Sentence("advance), score {:.1f} ± {:.1f}, {:.1f} points more than larger crops.", at_equal_time),
        Sentence(
            "activations takes {:.1f} times as long as one of 240² ({:.1f} and {:.1f} in two",
            lambda: [longer(LARGER_RECOMPUTED, *items) for items in ((), ("start1",), ("start2",))],
        ),
        Sentence("in-place norms {:.1f} times. 300", lambda: (longer(LARGER_IN_PLACE),)),
        Sentence(
            "tensors are {:.0f}, {:.0f} (in-place) and {:.0f} MiB (recomputed).",
            lambda: [
                row("camvid/table3_trained_steps", "", "start1", switch=switch)["peak_bytes"] / MIB
                for switch in ("default", LARGER_IN_PLACE, LARGER_RECOMPUTED)
            ],
        ),
        *(
            Sentence(
                f"{words} | {{:.2f}} | {{:.2f}} | {{:.2f}} | {{:.2f}} |",
                partial(sized, network, height),
            )
            for words, network, height in (
                ("EfficientNet-Lite0 | 360 x 480", "EfficientNet-Lite0", 360),
                ("4)", "EfficientNet-Lite0", 356),
                ("7)", "EfficientNet-Lite0", 353),
                ("ResNeXt | 360 x 480", "ResNeXt", 360),
                ("476", "ResNeXt", 356),
                ("473", "ResNeXt", 353),
            )
        ),
    ],
    "docs/results/cifar.md": [
        Sentence(
            "ends at {:.1f} and {:.1f} %, ResNet-32 at {:.1f} and {:.1f} %: after",
            lambda: single(
                "cifar/short/revnet38_seed0",
                "cifar/short/revnet38_seed1",
                "cifar/short/resnet32_seed0",
                "cifar/short/resnet32_seed1",
                key="top1",
            ),
        ),
        Sentence(
            "end at {:.1f} and {:.1f} %, so",
            lambda: single("cifar/short/resnet32_float32_seed0", "cifar/short/resnet32_float32_seed1", key="top1"),
        ),
        Sentence(
            "in float32: {:.2f} and {:.2f} %. Their",
            lambda: single("cifar/stored/stored", "cifar/stored/restored", key="top1"),
        ),
        Sentence("Restoring took {:.2f} times as", lambda: (restoring(),)),
        Sentence(
            "top-1 is {:.2f} % for ResNet-32 and {:.2f} % for",
            lambda: single("cifar/table3/resnet32", "cifar/table3/revnet38", key="top1"),
        ),
        Sentence(
            "copies ([above](#revnet-in-6000-steps)), {:.1f} % when they are saved again at quality 50, and {:.1f} "
            "% at",
            lambda: [of_quality(50), of_quality(20)],
        ),
        Sentence("On the {:,.0f} test images", lambda: (record("cifar/jpeg_originals")["images"]["test"],)),
        Sentence(
            "at most {:.2f} degrees in float32 and {:.2f} in bfloat16.",
            lambda: [max(restored(precision, "angle")) for precision in ("float32", "bfloat16")],
        ),
    ],
    "docs/results/reversible.md": [
        Sentence(
            "float32 | {:.3f}° | {:.5f}° | {:.0f}e-07 |",
            lambda: (
                max(restored("float32", "angle")),
                median(restored("float32", "angle")),
                1e7 * max(restored("float32", "drift")),
            ),
        ),
        Sentence(
            "bfloat16 | {:.2f}° | {:.1f}e-09° | {:.3f} |",
            lambda: (
                max(restored("bfloat16", "angle")),
                1e9 * median(restored("bfloat16", "angle")),
                max(restored("bfloat16", "drift")),
            ),
        ),
    ],
    "docs/tour.md": [
        Sentence("ends at {:.1f}. ```", lambda: single("camvid/norms/inplace")),
        Sentence(
            "ends at {:.1f} mIoU after {:.0f} minutes on",
            lambda: (mean(scores(LITE0)), mean(runs(LITE0, "training", "minutes"))),
        ),
    ],
    "docs/training.md": [
        Sentence(
            "instructions) and {:.2f} of the",
            lambda: (
                row("steps", "cpu", "start1", switch=BFLOAT16)["saved_bytes"]
                / row("steps", "cpu", "start1", switch="default")["saved_bytes"],
            ),
        ),
        Sentence(
            "step takes {:.0f} to {:.0f} seconds. This",
            lambda: [
                row("steps", "cpu_compile", "start1", switch=switch)["first_step_s"]
                for switch in (
                    "norm=std trainer.compile=true",
                    "trainer.compile=true trainer.accumulation_steps=3",
                )
            ],
        ),
        Sentence(
            "standard norms: {:.0f} ms instead of {:.0f} |",
            lambda: (ms(on_h100("standard")), ms(on_h100("standard", "trainer.tf32=false"))),
        ),
        Sentence(
            "in-place norms: {:.0f} ms instead of {:.0f}, in bfloat16 {:.0f} instead of {:.0f}; WRN-38 {:.0f} "
            "instead of {:.0f} |",
            lambda: [
                ms(on_h100("in-place", *precision, *graphs, call=call))
                for call, precision in (("h100", ()), ("h100", (BFLOAT16,)), ("h100_wrn38", ()))
                for graphs in ((GRAPHS,), ())
            ],
        ),
        Sentence(
            "ends at {:.1f} mIoU on CamVid val, the small ResNeXt from scratch at {:.1f}. Weights are",
            lambda: (mean(scores(LITE0)), *single("camvid/norms/inplace")),
        ),
    ],
}

# Versions, limits, published numbers, differences of numbers beside them, and what tests assert. On these pages, every
# other measured number stands in a sentence above.
QUOTED: dict[str, list[str]] = {
    "README.md": ["torch 2.11 to 2.14.", "with torch 2.11. The license", "Python 3.10 to 3.13"],
    "docs/keepless.md": [
        *("2.11 or later", "up to 1.5 times", "version 1.1.0", "so 1.1.0 never", "with torch 2.11 to 2.14;"),
    ],
    "docs/memory.md": [
        "mean, sigma | 32,768 bytes (1.00)",
        "| x, mean, sigma | 16,384 bytes (0.50)",
        "| x_hat, sigma | 16,384 bytes (0.50)",
        "inplace_1 | z, sigma | 16,384 bytes (0.50)",
        "inplace | z, sigma | 16,384 bytes (0.50)",
        "(section 3.3; the plus",
        "(tiles of 1 MiB on CPUs, 64 MiB on GPUs)",
        "to 1 (section 3.3)",
        "< 0.01 |beta|",
        "by 0.05 to 0.2 in pure",
        "less than 0.04 under",
        "at least -5.5 (ELU), to -11.1 … 5.5 (sigmoid) and to -3.1 … 3.1 (tanh)",
    ],
    "docs/results/README.md": [
        "are of torch 2.11",
        "takes torch 2.14",
        "crops into 12 GiB",
        "gains only 17 %",
        "same time within 4 %",
        "RevNet-38 ends 0.2 points below",
        "about 3.5 points below",
        "Section 3.3: gamma",
        "Table 3: in 12 GB 75, 50, 40 and 40 % more crops, or 72, 56, 56 and 35 % more pixels",
        "card limited to 12 GiB",
        "Section 4.1: ResNeXt-152",
        "Section 7.2: 128 images",
        "[limit of 12 GiB]",
        "Section 5.2: no RevNet is more than 0.5 % behind",
        "[0.2 points]",
        "Section 5.2: an update costs 1.5 to 2 times",
        "published 0.63 (MemCNN) and 1.10 (TensorFlow)",
    ],
}

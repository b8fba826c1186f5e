"""The promises of README.md and of docs/layouts.md, each with the tests of the first tier that prove it.

`make test` refuses to start if a test that is named here is missing from the first tier of a stack. `test_tiers` checks
that the tests exist, and that every layout and every command of the README is named.
"""

from __future__ import annotations

# Keys are words of the table in docs/layouts.md.
LAYOUTS = {
    "one process": ["integrations/test_transformers.py::test_trainer_equals_a_loop_by_hand"],
    "DDP": [
        "distributed/test_layouts.py::test_given_equal_gradients_every_layout_gives_the_bits_of_one_process",
        "integrations/test_transformers.py::TestProcesses::test_two_processes",
        "e2e/test_trainer_layouts.py::test_layout_equals_one_process",
        "e2e/test_llamafactory.py::test_two_processes_agree_with_one",
    ],
    "FSDP2 and HSDP": [
        "distributed/test_training.py::test_every_layout_trains_as_one_process",
        "e2e/test_trainer_layouts.py::test_layout_equals_one_process",
        "e2e/test_examples_llamafactory.py::test_llamafactory_fsdp2",
    ],
    "LLaMA-Factory v1": [
        "e2e/test_llamafactory_v1.py::test_two_processes_agree_with_one",
        "e2e/test_llamafactory_v1.py::test_resumed_run_equals_the_uninterrupted_one",
        "e2e/test_llamafactory_v1.py::test_refused_before_the_model_is_loaded",
    ],
    "LLaMA-Factory v1's Ulysses": ["integrations/test_llamafactory_v1.py::test_refused_with_the_arguments"],
    "tensor parallel": [
        "distributed/test_layouts.py::test_given_equal_gradients_every_layout_gives_the_bits_of_one_process",
        "e2e/test_trainer_layouts.py::test_layout_equals_one_process",
        "e2e/test_trainer_resume.py::test_resumed_run_is_the_uninterrupted_one",
    ],
    "DeepSpeed ZeRO": [
        "deepspeed/test_training.py::test_given_equal_gradients_every_stage_gives_the_bits_of_one_process",
        "deepspeed/test_training.py::test_every_stage_trains_as_one_process",
        "deepspeed/test_training.py::test_resume_is_exact",
        "deepspeed/test_trainer.py::test_trainer_equals_a_loop_by_hand",
        "deepspeed/test_nvme.py::test_resume_is_exact",
        "deepspeed/test_gradients.py::test_deepspeeds_own_flag_on_parameters",
        "deepspeed/test_gradients.py::test_a_branch_that_not_every_micro_batch_reaches",
        "deepspeed/test_guards.py::test_what_was_not_shown_to_work_is_refused_by_name",
        "e2e/test_deepspeed.py::test_trainer",
        "e2e/test_deepspeed.py::test_llamafactory_command",
    ],
    "Ulysses sequence parallel": [
        "deepspeed/test_ulysses.py::test_equals_one_process",
        "deepspeed/test_run_ulysses.py::test_trains_by_the_script",
    ],
    "pipeline stages": ["distributed/test_agreement.py::test_stages_of_a_pipeline_step_by_themselves"],
    "moments in the host's memory": [
        "distributed/test_offload.py::test_every_layout_gives_the_bits_of_a_run_without_offload",
        "e2e/test_trainer_layouts.py::test_fsdp_that_keeps_parameters_on_the_cpu_changes_nothing",
    ],
    "FSDP version 1": [
        "integrations/test_transformers_layout.py::TestRefusedLayouts::test_fsdp1_of_the_arguments",
        "integrations/test_transformers_layout.py::TestRefusedLayouts::test_megatron",
        "integrations/test_transformers_layout.py::TestRefusedLayouts::test_parallel_sequences",
        "e2e/test_llamafactory.py::test_megatron_is_refused",
    ],
    "tensor class": ["optimizer/test_tensor_classes.py::test_refused_by_its_class"],
}

# Keys are the words that follow `hf-muon` on the command line.
COMMANDS = {
    "inspect": ["cli/test_inspect.py::TestInspect::test_a_checkpoint_as_a_process"],
    "plan": [
        "cli/test_plan.py::TestPlan::test_as_a_process",
        "plan/test_memory.py::test_activations_are_what_autograd_saves",
        "plan/test_memory.py::test_the_buffers_of_a_step_are_bounded",
        "deepspeed/test_training.py::test_a_plan_foretells_bytes_memory_and_flops",
    ],
    "sweep": [
        "cli/test_sweep.py::TestResults::test_the_rate_with_the_lowest_loss",
        "cli/test_sweep.py::TestContinuing::test_an_interrupted_sweep_ends_as_an_uninterrupted_one",
    ],
    "report": ["diagnostics/test_page.py::test_as_a_process", "diagnostics/test_browser.py::test_in_a_browser"],
    "doctor": ["cli/test_app.py::test_doctor"],
    "convert": ["cli/test_convert.py::TestConvert::test_as_a_program"],
}

OTHERS = {
    "optim: muon without an import": [
        "integrations/test_transformers.py::TestProcesses::test_script_without_our_import",
        "test_autoload.py::test_the_name_is_accepted_whatever_was_imported_first",
        "integrations/test_llamafactory_v1.py::test_import_torch_alone_brings_it_in",
    ],
    "HF_MUON_AUTOLOAD=0": [
        "test_autoload.py::test_switched_off",
    ],
    "every option, everywhere": [
        "test_config.py::test_the_page_holds_todays_tables_with_every_option_once",
        "test_config.py::test_docstrings_and_errors_follow_from_the_declaration",
        "test_config.py::test_optim_args_are_typed",
    ],
    "examples of LLaMA-Factory, TRL and the Trainer": [
        "e2e/test_examples_llamafactory.py::test_llamafactory_sft",
        "e2e/test_examples_trl.py::test_trl",
        "e2e/test_examples_trainer.py::test_trainer_equals_a_plain_loop_and_resumes",
    ],
    "routes of real models, in both versions of transformers": [
        "routing/test_golden.py::test_routes_and_views_are_the_committed_ones"
    ],
    "fused projections, part by part": [
        "routing/test_fused.py::test_a_part_of_zeros_silences_the_others",
        "distributed/test_views.py::test_every_layout_gives_the_bits_of_one_process",
    ],
    "LoRA opts in": ["integrations/test_transformers.py::test_lora", "deepspeed/test_trainer.py::test_lora"],
    "momentum in bf16 and int8": [
        "distributed/test_momentum.py::test_bf16_rounds_alike_in_every_layout",
        "distributed/test_momentum.py::test_int8_rounds_alike_in_every_layout",
        "deepspeed/test_training.py::test_bf16_moments_are_rounded_as_in_one_process_and_resumed",
    ],
    "exact resume": [
        "distributed/test_training.py::test_resume_is_exact",
        "integrations/test_resume.py::TestResume::test_is_bit_exact",
        "e2e/test_trainer_resume.py::test_resumed_run_is_the_uninterrupted_one",
        "e2e/test_llamafactory.py::test_resumed_run_equals_the_uninterrupted_one",
        "deepspeed/test_trainer.py::test_resume_is_exact",
    ],
    "a checkpoint of another layout": [
        "distributed/test_checkpoints.py::test_from_layout_to_layout",
        "e2e/test_trainer_resume.py::test_resumed_run_on_another_number_of_processes",
        "deepspeed/test_resharding.py::test_stages_offload_and_order",
    ],
    "moments cannot be lost": ["distributed/test_training.py::test_resume_without_moments_is_refused_or_seen"],
    "DeepSpeed's damaged files, and files of several saves": [
        "deepspeed/test_loading.py::test_files_of_another_save_are_refused",
        "deepspeed/test_loading.py::test_an_error_of_one_rank_is_an_error_of_all",
        "deepspeed/test_resharding.py::test_files_of_all_ranks_are_checked_first",
    ],
    "the work is shared": [
        "distributed/test_work.py::test_newton_schulz_is_shared",
        "distributed/test_work.py::test_bytes_and_collectives",
    ],
    "all ranks step or none does": [
        "distributed/test_preflight.py::test_a_fault_on_one_rank_is_the_same_error_on_all",
        "e2e/test_trainer_layouts.py::test_all_ranks_refuse_a_gradient_that_is_not_finite_on_one",
    ],
    "a killed rank": ["chaos/test_faults.py::test_the_others_end_and_the_checkpoint_before_resumes"],
    "bf16, clipping, compile and fp16": [
        "integrations/test_transformers.py::test_bf16_weights",
        "integrations/test_transformers.py::test_clipping_is_of_the_gradient_not_of_the_direction",
        "integrations/test_transformers.py::test_frozen_layers",
        "e2e/test_trainer_layouts.py::test_fp16_skips_a_step_on_all_ranks",
    ],
    "states of other Muons": ["convert/test_conversion.py::TestAgainstAStraightRun::test_weights"],
    "AdamW is torch's": ["optimizer/test_muon.py::test_adamw_half_is_bit_equal_to_torch"],
    "meta device and fake tensors": ["optimizer/test_fake_tensors.py::test_with_fake_tensors"],
    "copies": ["optimizer/test_copies.py::test_a_copy_steps_alike"],
}

TESTS = {f"tests/{test}" for part in (LAYOUTS, COMMANDS, OTHERS) for tests in part.values() for test in tests}
"""Node ids of all of them, without their cases."""

//! The integration tests of the workspace, one module per topic.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

// Sharded training compared with the unsharded oracle.
mod parity;

// Ranks that share samples.
mod context;
mod expert_axis;

// Parameters that are kept in f32.
mod keep_f32;

// Corrections of routers that follow loads.
mod router_bias;

// What routers add to the loss.
mod router_terms;

// Planted errors in which losses look healthy.
mod silent;
mod silent_state;

// Random runs, as a user would write them.
mod parity_case;

// Ranks that communicate over TCP, like those of several processes.
mod over_tcp;

// Every promise of `verify`, for random models, policies, meshes and orders.
mod parity_properties;

// AdamW with 8-bit moments, also compared with bitsandbytes and torchao (tests/golden).
mod adamw8bit;

// Muon, also compared with PyTorch (tests/golden).
mod muon;

// Runs without the oracle.
mod runs;
mod schedule_free;

// Steps issued before the previous report is read.
mod ahead;

// Cases in which all world sizes agree in every bit: exact sums, shared storage, evaluation.
mod exact;

// Gradients averaged over ranks.
mod average;

// Bytes and calls compared with formulas.
mod traffic;

// Steps compiled by XLA, and the collectives it keeps.
mod xla;
mod xla_collectives;
mod xla_half;
mod xla_scan;
mod xla_updates;

// Model families, sharded and unsharded.
mod experts;
mod families;

// Training in f16 with loss scaling.
mod half_precision;

// Adapters.
mod dora;
mod expert_adapters;
mod lora;

// Adapters compared with PEFT (tests/golden).
mod peft;

// Adapters of a quantized base.
mod qlora;

// More ranks than cores.
mod many_ranks;

// Sharded training compared with PyTorch and transformers (tests/golden).
mod golden_training;

// Generation compared with transformers (tests/golden).
mod generating;

// Loss terms compared with PyTorch and transformers (tests/golden).
mod golden_losses;

// Learning rates compared with PyTorch and transformers (tests/golden).
mod golden_schedules;

// A backend with hooked operations, and a model that uses it to fail, leak or allocate.
mod hooked;
mod planted;

// Memory counters compared with the ledger, and planted leaks; CPU offload.
mod memory;
mod offload;

// Ranks that fail during training.
mod faults;

// Processes that die at any moment of a run.
mod deaths;
mod mortal;

// Schedules with a planted error.
mod adversarial;

// Runs that save, end, and resume elsewhere.
mod resume;
mod resume_states;

// A folder with checkpoints: a run resumes, goes back, or is refused.
mod going_on;

// Starting several replicas from files.
mod loading;

// Run files and checkpoints of this version and of those before (tests/golden/versions).
mod versions;

// Links between documents, and the pages of the site.
mod documents;

// What packages say of themselves.
mod packages;

// Code conventions.
mod tidy;

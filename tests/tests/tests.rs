//! The integration tests of the workspace, one module per theme.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

// Sharded training against the unsharded oracle.
mod parity;

// Random runs, as the text that a user would write.
mod parity_case;

// Ranks that talk over TCP, as those of several processes.
mod over_tcp;

// Every promise of `verify`, for random models, policies, meshes and orders.
mod parity_properties;

// AdamW with 8-bit moments, against bitsandbytes and torchao (tests/golden) too.
mod adamw8bit;

// Muon, against PyTorch (tests/golden) too.
mod muon;

// Ranks of a run without the oracle.
mod runs;

// Steps issued ahead of reading the one before.
mod ahead;

// Where every world agrees in all bits: exact sums, shared storage, evaluation.
mod exact;

// Gradients averaged over ranks.
mod average;

// Bytes and calls against formulas.
mod traffic;

// Steps that XLA compiles; which collectives of a schedule it leaves.
mod xla;
mod xla_collectives;
mod xla_half;
mod xla_scan;
mod xla_updates;

// Families of models, sharded and not.
mod experts;
mod families;

// Values in f16, with a scale of the loss.
mod half_precision;

// More ranks than cores.
mod lora;
mod many_ranks;

// Sharded training against PyTorch and transformers (tests/golden).
mod golden_training;

// Generating against transformers (tests/golden).
mod generating;

// Terms of the loss against PyTorch (tests/golden).
mod golden_losses;

// Learning rates against PyTorch and transformers (tests/golden).
mod golden_schedules;

// A backend that does something else on demand; a model that fails, leaks or allocates by it.
mod hooked;
mod planted;

// The counter against the ledger, and planted leaks.
mod memory;
mod offload;

// Ranks that fail while they train.
mod faults;

// Processes that die, at every moment of a run.
mod deaths;
mod mortal;

// Schedules with an error planted in them.
mod adversarial;

// Runs that are saved, end, and go on elsewhere.
mod resume;
mod resume_states;

// A folder with checkpoints: a run goes on there, goes back, or is refused.
mod going_on;

// Starting from files, on several replicas.
mod loading;

// Rules of the house.
mod tidy;

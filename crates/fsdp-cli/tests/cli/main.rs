//! The `fsdp` binary as a user sees it: files in a folder, arguments, exit codes, text.
//!
//! Every test has a folder of its own, which is also the current directory of the command, so messages contain relative
//! paths. Snapshots hold output that users read.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod interposer;
mod support;

mod help;

// A run: its output, repeating it and resuming it.
mod train;

// Checking a run file without running it; writing one.
mod checking;
mod init;

// Early stopping and keeping the best checkpoints.
mod early_stopping;

// Evaluating a model outside of training.
mod evaluating;

// Judging the steps of other programs.
mod audit_init;
mod auditing;

// Generating text.
mod generating;

// Optimizers: parameter groups, averaged parameters.
mod optimizers;

// Tokens cached for later starts.
#[cfg(feature = "tokenizers")]
mod kept_tokens;

// Conversations, and which of their tokens count.
#[cfg(feature = "tokenizers")]
mod chats;
mod hostile_templates;

// How a run starts: its output folder, object stores, and the checkpoint it resumes from.
mod start;
mod stores;
mod trace_file;
mod unsound;

// Reading the checkpoints of other trainers, and writing checkpoints and models for others.
mod dcp_layouts;
mod exports;
mod others;

// SIGINT and SIGTERM.
mod signals;

// What a system can run out of.
mod exhaustion;

// The log, all forms of metrics, and reports on them; comparing them with the Trainer's.
mod comparing;
mod watching;

// Several processes: any launcher, joint failure, restarts.
mod kills;
mod launchers;
mod launching;
mod namespaces;
mod places;
mod processes;
mod random_runs;
mod shell;
mod slurm;
mod strangers;
mod supervising;
mod together;
mod world;
mod wrapped;

// Measuring this machine, and planning runs on others.
mod calibrating;
mod planning;

// The reports of `schedule` and `verify`, and traces.
mod reports;
mod verification;

// Invalid input: exit code 2 and a message that says what to do.
mod adapters;
mod against_model;
mod bad_input;
mod bad_weights;
mod mixtures;

// Malicious or accidentally harmful input.
mod hostile_input;

// Output that cannot be written, and control characters in output.
mod disk_full;
mod terminal;

// Failures that must never cost a run its state.
mod lost_state;

// Data sources, and devices that need a feature: with it and without it.
mod data_sources;
mod devices;
#[cfg(feature = "cuda")]
mod installed;
#[cfg(not(feature = "torch"))]
mod with_libtorch;

// The machine's hardware and speed; several nodes.
mod machine;

// Checkpoints: fixtures, reports, conversions, failures.
mod ckpt;
mod ckpt_convert;
mod ckpt_failures;
mod ckpt_folders;
mod ckpt_hostile;
mod ckpt_reports;

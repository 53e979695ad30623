//! The `fsdp` binary as a user meets it: files in a folder, arguments, exit codes, text.
//!
//! Every test has a folder of its own, which is also the current directory of the command, so that messages
//! name relative paths. Snapshots hold what is meant to be read.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod interposer;
mod support;

// Help pages.
mod help;

// A run: what it writes, and that it can be repeated and continued.
mod train;

// A run file that is looked at, and not run; one that is written.
mod checking;
mod init;

// Runs that evaluations end.
mod early_stopping;

// Evaluating a model by itself.
mod evaluating;

// Text that a model goes on with.
mod generating;

// Optimizers: groups of parameters, averages.
mod optimizers;

// Tokens of text that are kept for later starts.
#[cfg(feature = "tokenizers")]
mod kept_tokens;

// Conversations, and which of their tokens count.
#[cfg(feature = "tokenizers")]
mod chats;

// How a run begins: what it takes for its own, what it leaves as it was, what it goes on from.
mod start;
mod stores;
mod trace_file;
mod unsound;

// Other trainers: their checkpoints, and ours for them.
mod others;

// SIGINT and SIGTERM.
mod signals;

// The log, metrics in all their forms, and reports on them.
mod watching;

// Several processes: started by whatever, failing together, started again.
mod kills;
mod launchers;
mod launching;
mod namespaces;
mod processes;
mod random_runs;
mod shell;
mod slurm;
mod strangers;
mod supervising;
mod together;
mod world;
mod wrapped;

// What runs will take elsewhere, and what a machine takes.
mod calibrating;
mod planning;

// The reports of `schedule` and `verify`, and traces.
mod reports;
mod verification;

// Input that is wrong: exit code 2 and a message that says what to do.
mod adapters;
mod bad_input;
mod bad_weights;

// Input that is meant to do harm, or would by accident.
mod hostile_input;

// Output that cannot be written, and what may reach a terminal.
mod disk_full;
mod terminal;

// What must never cost a run its state.
mod lost_state;

// Devices that need a feature: with it, and without.
mod data_sources;
mod devices;
#[cfg(feature = "cuda")]
mod installed;

// What the machine has, and how fast it is.
mod machine;
mod nodes;

// Checkpoints: fixtures, reports, conversions, and what goes wrong.
mod ckpt;
mod ckpt_convert;
mod ckpt_failures;
mod ckpt_folders;
mod ckpt_hostile;
mod ckpt_reports;

//! Errors of audits.

use std::path::PathBuf;

use fsdp_core::DType;
use fsdp_core::out_of_memory::Size;

use super::plan::AuditMemory;
use crate::memory::Available;

/// Why a step cannot be judged.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The file with the batch is wrong.
    #[error("{}: tensor {tensor}: {what}", path.display())]
    Batch {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        what: String,
    },
    /// The states are not one step apart.
    #[error(
        "{} has done {before_steps} steps and {} has done {after_steps}, expected {steps} more: an audit needs two states one \
         step apart, saved by one run (save after every step, for two steps); of states further apart, --steps N judges the \
         whole update, given the micro-batches of all N steps",
        before.display(), after.display()
    )]
    Steps {
        /// The first checkpoint.
        before: PathBuf,
        /// Its steps.
        before_steps: u64,
        /// The second checkpoint.
        after: PathBuf,
        /// Its steps.
        after_steps: u64,
        /// Steps that should be between them.
        steps: usize,
    },
    /// No run does so many steps.
    #[error(
        "{steps} steps are more than any run does ({} at most): check --at-step, --steps and the step counts of the states",
        super::counts::STEPS_MAX
    )]
    TooManySteps {
        /// The steps.
        steps: u64,
    },
    /// A state lacks that of the optimizer.
    #[error(
        "{} has no state of an optimizer, and only its moments contain the gradient that was used: save the optimizer together with \
         the model, before the step and after it",
        path.display()
    )]
    NoState {
        /// The checkpoint.
        path: PathBuf,
    },
    /// A state has moments, and the optimizer of the run file keeps none.
    #[error(
        "{} has moments ({example}), and train.optimizer is sgd without momentum, which keeps none: name the optimizer that the \
         program used",
        path.display()
    )]
    OtherOptimizer {
        /// The checkpoint.
        path: PathBuf,
        /// Name of such a moment.
        example: String,
    },
    /// The second state is not what became of the first one.
    #[error(
        "{} does not follow {}: {share:.0} % of the second moments are much smaller than before, and one step of Adam does not \
         make them so; give two states of one run, between which its optimizer was not created anew",
        after.display(), before.display()
    )]
    NotFollowing {
        /// The first checkpoint.
        before: PathBuf,
        /// The second checkpoint.
        after: PathBuf,
        /// Percentage of elements that are too small.
        share: f64,
    },
    /// A state has values that are not finite.
    #[error(
        "{}: {name} has values that are not finite (NaN or infinite), so the step cannot be judged; look at them with \
         `fsdp ckpt inspect`",
        path.display()
    )]
    StateNotFinite {
        /// The checkpoint.
        path: PathBuf,
        /// The parameter, or the state of one.
        name: String,
    },
    /// The gradient of the step is not finite here.
    #[error(
        "the gradient of {name} that the model computes from the state before and the batch is not finite, so there is nothing to \
         compare the used one with"
    )]
    NotFinite {
        /// The parameter.
        name: String,
    },
    /// In 16 bits, the choice of experts depends on the kernels.
    #[error(
        "{what}; but where two experts are nearly as good for a token, kernels that round otherwise in {dtype} choose another one, \
         so this says nothing about the program: let it make the two steps in float32"
    )]
    Routing {
        /// What was found.
        what: String,
        /// The dtype in which the run computes.
        dtype: DType,
    },
    /// Routers are balanced over text only, and padding is in front of it.
    #[error(
        "attention_mask: rows have padding in front of text, and the balancing loss of routers cannot be computed for such \
         rows; pad after the text for the audited step"
    )]
    LeftPadding,
    /// The optimizer keeps nothing from which its gradient follows.
    #[error(
        "train.optimizer keeps no first moment in full precision, so its state does not contain the gradient that it used; \
         adamw, lion and sgd can be judged"
    )]
    NoMoment,
    /// The moments of a state have few bits.
    #[error(
        "{} has the moments of {by} in 8 bits or fewer ({example}), so they do not contain the gradient that was used; let the \
         program make the two steps with an optimizer that keeps its moments in 16 or 32 bits",
        path.display()
    )]
    RoundedMoments {
        /// The checkpoint.
        path: PathBuf,
        /// The library that rounds them.
        by: &'static str,
        /// Name of such a moment.
        example: String,
    },
    /// Without a moment and without a learning rate, weights do not change.
    #[error(
        "the learning rate of {name} is 0 in this step, and sgd without momentum shows its gradient only by what it changes: \
         audit a step with a learning rate"
    )]
    NoRate {
        /// The parameter.
        name: String,
    },
    /// Without a moment, weights that round more than they move show nothing.
    #[error(
        "weights move by less than their rounding in this step, and sgd without momentum shows its gradient only by what it \
         changes: audit a step with momentum, with weights in float32, or with a larger learning rate"
    )]
    Still,
    /// The step needs more memory than there is.
    #[error(
        "{ranks} rank(s) need {} of memory at once, but {available}: each {} for the largest layer and its gradient, {} for \
         activations and {} for the states of several steps. Fewer or shorter micro-batches need less for activations; fewer ranks on this machine need less in \
         all, and so do more ranks on other machines (`fsdp launch`, srun or torchrun), to which the micro-batches are dealt; a layer has to \
         fit each rank",
        Size((need.certain() * *ranks as u64) as usize), Size(need.layer as usize), Size(need.activations as usize),
        Size(need.states as usize)
    )]
    Memory {
        /// What a rank needs.
        need: AuditMemory,
        /// Ranks on this machine.
        ranks: usize,
        /// What is left.
        available: Available,
    },
    /// The micro-batches cannot be those of so many steps.
    #[error(
        "{}: {count} micro-batches of {ranks} rank(s) are not those of {steps} steps: each rank has to have the same number in \
         each step, and its steps follow each other",
        path.display()
    )]
    MicroBatches {
        /// The file.
        path: PathBuf,
        /// Its micro-batches.
        count: usize,
        /// The ranks that it names; 1 if it names none.
        ranks: usize,
        /// The steps.
        steps: usize,
    },
    /// The file with the batch does not say of how many ranks it is.
    #[error("{}: its metadata has ranks = {text:?}, expected their number, such as \"2\"", path.display())]
    Ranks {
        /// The file.
        path: PathBuf,
        /// What it says.
        text: String,
    },
}

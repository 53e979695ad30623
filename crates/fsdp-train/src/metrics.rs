//! The metrics of steps and evaluations, and all outputs that they are written to. Measuring is left to the trainer;
//! this module only reads the time of day, which some formats require.

mod csv;
mod experts;
mod exposition;
mod file;
mod line;
mod mlflow;
mod recorder;
mod sink;
mod tensorboard;

pub(crate) use csv::{EVALUATIONS, STEPS};
pub use experts::ExpertLoads;
pub(crate) use exposition::MetricsServer;
pub(crate) use file::{METRICS, last_step, last_step_in};
pub use line::{
    EvalMetrics, Evaluation, FlopModel, LossParts, ProcessInfo, ProcessTable, Scaling, StepMetrics,
    Utilization, Waiting,
};
pub(crate) use line::{StepLoss, parts};
pub(crate) use mlflow::MLFLOW;
pub(crate) use recorder::Recorder;
pub(crate) use tensorboard::TENSORBOARD;

#[cfg(test)]
mod tests;

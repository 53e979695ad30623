//! The `[train]` table: how long, in what batches, and with which update.

use fsdp_nn::layer::Description;
use fsdp_nn::op::LossTerms;

use super::early_stop::EarlyStopConfig;
use super::error::ConfigError;
use super::kind::{BETA, MICRO_BATCH_SIDE, NON_NEGATIVE, POSITIVE, POSITIVE_COUNT, SIZE};
use super::loss_scale::LossScaleConfig;
use super::optimizer::OptimizerConfig;
use super::reader::Reader;
use super::schedule::LrScheduleConfig;
use super::table::table;
use super::written;

table! {
    /// The `[train]` table.
    pub struct TrainConfig {
        /// Optimizer steps.
        steps: u64 = required(POSITIVE_COUNT),
        /// Samples per forward and backward.
        micro_batch_size: usize = required(MICRO_BATCH_SIDE),
        /// Samples per optimizer step.
        global_batch_size: usize = required(SIZE),
        /// The largest global L2 norm of the gradient, if it is clipped.
        grad_clip: Option<f64> = or_none(POSITIVE),
        /// The update rule.
        optimizer: OptimizerConfig = table(OptimizerConfig::read),
        /// What a step leaves of an average of the parameters, if one is kept.
        ema_decay: Option<f64> = or_none(BETA),
        /// How much of a target is spread evenly over all tokens.
        label_smoothing: f64 = or(BETA, 0.0),
        /// Coefficient of the squared logarithm of the sum of the logits' exponentials.
        z_loss: f64 = or(NON_NEGATIVE, 0.0),
        /// Coefficient of the balancing loss of routers, if not the one that the model's `config.json` asks for.
        router_aux_loss_coef: Option<f64> = or_none(NON_NEGATIVE),
        /// How the learning rate goes over the steps.
        lr_schedule: LrScheduleConfig = table(LrScheduleConfig::read),
        /// What gradients in f16 are multiplied with, if not the default.
        loss_scale: Option<LossScaleConfig> = table_or_none(LossScaleConfig::read),
        /// When evaluations end the run before its last step, if they do.
        early_stop: Option<EarlyStopConfig> = table_or_none(EarlyStopConfig::read),
    }
}

impl TrainConfig {
    /// What training adds to the cross-entropy of a model.
    pub fn loss_terms(&self, model: &Description) -> LossTerms {
        let router_loss = self.router_aux_loss_coef.unwrap_or(model.router_loss);
        let (label_smoothing, z_loss) = (self.label_smoothing, self.z_loss);
        LossTerms { label_smoothing, z_loss, router_loss, ..LossTerms::default() }
    }

    /// V: the micro-batches of one step, whatever the world.
    pub fn micro_batches_per_step(&self) -> usize {
        self.global_batch_size / self.micro_batch_size
    }
}

//! The `[train]` table: number of steps, batch sizes, and the update rule.

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
use super::writer;

table! {
    /// The `[train]` table.
    pub struct TrainConfig {
        /// Number of optimizer steps.
        steps: u64 = required(POSITIVE_COUNT),
        /// Samples per micro-batch of a rank.
        micro_batch_size: usize = required(MICRO_BATCH_SIDE),
        /// Samples per optimizer step, over all ranks.
        global_batch_size: usize = required(SIZE),
        /// Maximum global L2 norm of the gradient; none means no clipping.
        grad_clip: Option<f64> = or_none(POSITIVE),
        /// The optimizer.
        optimizer: OptimizerConfig = table(OptimizerConfig::read),
        /// Decay of the moving average of the parameters (EMA); none means no average.
        ema_decay: Option<f64> = or_none(BETA),
        /// Label smoothing: the share of each target spread evenly over all tokens.
        label_smoothing: f64 = or(BETA, 0.0),
        /// Coefficient of z-loss, the squared log-sum-exp of the logits.
        z_loss: f64 = or(NON_NEGATIVE, 0.0),
        /// Coefficient of the load-balancing loss of routers; none means that of the model's `config.json`.
        router_aux_loss_coef: Option<f64> = or_none(NON_NEGATIVE),
        /// Coefficient of the z-loss of routers, the squared log-sum-exp of their logits.
        router_z_loss_coef: f64 = or(NON_NEGATIVE, 0.0),
        /// Coefficient of the sequence-wise balance loss of routers: within each document, or sample that is not packed.
        router_sequence_loss_coef: f64 = or(NON_NEGATIVE, 0.0),
        /// How far a step moves the corrections of routers towards even loads; 0 leaves them as they are.
        router_bias_update_speed: f64 = or(NON_NEGATIVE, 0.0),
        /// Learning rate schedule.
        lr_schedule: LrScheduleConfig = table(LrScheduleConfig::read),
        /// Loss scale of training in f16, if not the default.
        loss_scale: Option<LossScaleConfig> = table_or_none(LossScaleConfig::read),
        /// When evaluations end the run before its last step; none means never.
        early_stop: Option<EarlyStopConfig> = table_or_none(EarlyStopConfig::read),
    }
}

impl TrainConfig {
    /// Returns the terms that training adds to the model's cross-entropy.
    pub fn loss_terms(&self, model: &Description) -> LossTerms {
        let router_loss = self.router_aux_loss_coef.unwrap_or(model.router_loss);
        let (label_smoothing, z_loss) = (self.label_smoothing, self.z_loss);
        LossTerms {
            label_smoothing,
            z_loss,
            router_loss,
            router_z_loss: self.router_z_loss_coef,
            router_sequence_loss: self.router_sequence_loss_coef,
            ..LossTerms::default()
        }
    }

    /// V: the number of micro-batches per step, independent of the world size.
    pub fn micro_batches_per_step(&self) -> usize {
        self.global_batch_size / self.micro_batch_size
    }
}

//! Describes the balancing loss of routers.

use fsdp_nn::model::Architecture as _;
use fsdp_train::Job;

use crate::run_setup::Model;

/// The loss term of a mixture-of-experts model, and the setting it comes from.
pub(super) fn line(job: &Job<Model>) -> Option<String> {
    let (train, model) = (&job.config.train, job.architecture.description());
    if model.mixtures.is_empty() {
        return None;
    }
    let origin = match train.router_aux_loss_coef {
        Some(_) => "train.router_aux_loss_coef",
        None if model.router_loss > 0.0 => "config.json",
        None => "config.json has no output_router_logits; train.router_aux_loss_coef adds one",
    };
    Some(match train.loss_terms(model).router_loss {
        0.0 => format!("no balancing loss of routers ({origin})"),
        coefficient => format!("balancing loss of routers times {coefficient} ({origin})"),
    })
}

//! Describes how routers are balanced.

use fsdp_nn::model::Architecture as _;
use fsdp_train::Job;

use crate::run_setup::Model;

/// The loss terms of a mixture-of-experts model, the setting it comes from, and what becomes of the corrections of routers.
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
    let loss = match train.loss_terms(model).router_loss {
        0.0 => format!("no balancing loss of routers ({origin})"),
        coefficient => format!("balancing loss of routers times {coefficient} ({origin})"),
    };
    let more = [
        ("z-loss of routers", train.router_z_loss_coef),
        ("sequence-wise balance loss", train.router_sequence_loss_coef),
    ];
    let more = more.into_iter().filter(|(_, coefficient)| *coefficient != 0.0);
    let more: String = more.map(|(name, coefficient)| format!(", {name} times {coefficient}")).collect();
    let corrections = match (model.score_biases.is_empty(), train.router_bias_update_speed) {
        (true, _) => String::new(),
        (false, 0.0) => "; their corrections stay (train.router_bias_update_speed moves them)".to_owned(),
        (false, speed) => format!("; their corrections move by {speed} per step"),
    };
    Some(loss + &more + &corrections)
}

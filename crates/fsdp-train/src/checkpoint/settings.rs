//! Optimizer settings in PyTorch's format, by parameter group: written into the state of a run, and used to compare
//! those of another trainer with the run file.

use std::collections::BTreeMap;

use fsdp_ckpt::checkpoint::Value;
use fsdp_config::OptimizerConfig;
use fsdp_core::model::ParamId;
use fsdp_nn::update::{GroupSettings, Groups};
use serde_json::{Map, Value as Json, json};

use super::run_state::{Change, Difference};
use crate::job::Job;
use crate::rule::{self, ParamGroup};

/// Largest relative difference of two equal settings: a learning rate is the product of a schedule.
const RELATIVE_TOLERANCE: f64 = 1e-9;

/// Returns the differences between saved settings and those of the job for the next step, per parameter, as changes; or
/// every difference that amounts to another update rule.
pub(super) fn compare<A>(
    job: &Job<A>,
    groups: &Groups,
    saved: &[BTreeMap<String, Value>],
    step: u64,
) -> Result<Vec<Change>, Vec<Difference>> {
    let (mut changes, mut refused) = (BTreeMap::<_, Vec<&str>>::new(), Vec::new());
    for (index, (param, settings)) in job.plan.spec.params.iter().zip(saved).enumerate() {
        for (key, ours) in ours(job, groups.of(ParamId(index)), step) {
            let theirs = settings.get(key).and_then(numbers);
            if let Some(theirs) = theirs.filter(|theirs| !are_close(theirs, &ours)) {
                let texts = [theirs, ours].map(|values| text(&values));
                changes.entry((key, texts)).or_default().push(&param.fqn);
            }
        }
        for (key, ours, is_rule) in flags(&job.config.train.optimizer) {
            if settings.get(key) != Some(&Value::Bool(!ours)) {
                continue;
            }
            let [from, to] = [!ours, ours].map(|flag| flag.to_string());
            if !is_rule {
                changes.entry((key, [from, to])).or_default().push(&param.fqn);
                continue;
            }
            let what = format!("setting `{key}` of the optimizer");
            if !refused.iter().any(|difference: &Difference| difference.what == what) {
                refused.push(Difference { what, saved: from, given: to });
            }
        }
    }
    if !refused.is_empty() {
        return Err(refused);
    }
    let all = saved.iter().filter(|settings| !settings.is_empty()).count();
    let change = |((key, [from, to]), params): ((&str, [String; 2]), Vec<&str>)| {
        let of = match (params.len() == all, params.len() - 1) {
            (true, _) => String::new(),
            (false, 0) => format!(" of {}", params[0]),
            (false, more) => format!(" of {} and {more} more", params[0]),
        };
        Change { step, key: format!("train.optimizer.{key}{of}"), from, to }
    };
    Ok(changes.into_iter().map(change).collect())
}

/// Boolean settings: name, value in this run, and whether the other value would be an update rule that is not
/// implemented here.
fn flags(optimizer: &OptimizerConfig) -> Vec<(&'static str, bool, bool)> {
    let maximize = ("maximize", false, true);
    match optimizer {
        OptimizerConfig::Adamw(_) | OptimizerConfig::Adamw8bit(_) => {
            vec![maximize, ("amsgrad", false, true), ("decoupled_weight_decay", true, true)]
        }
        OptimizerConfig::Sgd(c) => vec![maximize, ("nesterov", c.nesterov, false)],
        OptimizerConfig::Adafactor(_)
        | OptimizerConfig::Lion(_)
        | OptimizerConfig::Muon(_)
        | OptimizerConfig::ScheduleFree(_) => vec![maximize],
    }
}

/// The settings of a parameter for the step after `step`, under PyTorch's names.
fn ours<A>(job: &Job<A>, group: GroupSettings, step: u64) -> Vec<(&'static str, Vec<f64>)> {
    let decay = ("weight_decay", vec![group.weight_decay]);
    let lr = ("lr", vec![job.schedule.lr(step) * group.lr_scale]);
    match &job.config.train.optimizer {
        OptimizerConfig::Adamw(c) | OptimizerConfig::Adamw8bit(c) => {
            vec![lr, ("betas", c.betas.to_vec()), ("eps", vec![c.eps]), decay]
        }
        OptimizerConfig::Sgd(c) => {
            vec![lr, ("momentum", vec![c.momentum]), ("dampening", vec![c.dampening]), decay]
        }
        OptimizerConfig::Adafactor(_) => vec![decay],
        OptimizerConfig::Lion(c) => vec![lr, ("betas", c.betas.to_vec()), decay],
        // Only the settings that matrices and other parameters share.
        OptimizerConfig::Muon(_) => vec![lr, decay],
        OptimizerConfig::ScheduleFree(c) => {
            vec![lr, ("betas", c.betas.to_vec()), ("eps", vec![c.eps]), decay]
        }
    }
}

/// The groups that PyTorch's optimizer would have after `step` steps: first all parameters in no group of the run file,
/// then the file's groups in order. `null` if PyTorch has no such optimizer.
pub(super) fn param_groups<A>(job: &Job<A>, step: u64) -> Json {
    let optimizer = &job.config.train.optimizer;
    let rest = match optimizer {
        OptimizerConfig::Adamw(_) => {
            json!({ "amsgrad": false, "capturable": false, "decoupled_weight_decay": true })
        }
        OptimizerConfig::Sgd(c) => json!({ "nesterov": c.nesterov }),
        // In PyTorch, Muon and its AdamW are two optimizers.
        OptimizerConfig::Adamw8bit(_)
        | OptimizerConfig::Adafactor(_)
        | OptimizerConfig::Lion(_)
        | OptimizerConfig::Muon(_)
        | OptimizerConfig::ScheduleFree(_) => return Json::Null,
    };
    let spec = &job.plan.spec;
    let mut groups = rule::param_groups(optimizer, spec).expect("the rule of the job was made of them");
    groups.rotate_right(1);
    let group = |ParamGroup { settings, params, .. }: ParamGroup| {
        let trained = params.iter().map(|&id| spec.param(id)).filter(|param| param.trainable);
        let params: Vec<&str> = trained.map(|param| param.fqn.as_str()).collect();
        if params.is_empty() {
            return None;
        }
        let mut group: Map<String, Json> = Map::new();
        for (key, values) in ours(job, settings, step) {
            group.insert(key.to_owned(), if values.len() == 1 { json!(values[0]) } else { json!(values) });
        }
        group.extend(rest.as_object().cloned().unwrap_or_default());
        for (key, value) in [("maximize", json!(false)), ("differentiable", json!(false))] {
            group.insert(key.to_owned(), value);
        }
        // PyTorch chooses its own implementation.
        group.extend(["foreach", "fused"].map(|key| (key.to_owned(), Json::Null)));
        group.insert("params".to_owned(), json!(params));
        Some(Json::Object(group))
    };
    groups.into_iter().filter_map(group).collect()
}

fn numbers(value: &Value) -> Option<Vec<f64>> {
    match value {
        Value::Float(number) => Some(vec![*number]),
        Value::Int(number) => Some(vec![*number as f64]),
        Value::List(items) | Value::Tuple(items) => {
            items.iter().map(|item| numbers(item)?.first().copied()).collect()
        }
        _ => None,
    }
}

fn are_close(a: &[f64], b: &[f64]) -> bool {
    let is_close = |(a, b): (&f64, &f64)| (a - b).abs() <= RELATIVE_TOLERANCE * a.abs().max(b.abs());
    a.len() == b.len() && a.iter().zip(b).all(is_close)
}

/// Formats values as TOML does.
fn text(values: &[f64]) -> String {
    match values {
        [value] => value.to_string(),
        several => format!("{several:?}"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fsdp_nn::model::{Architecture, Mlp, MlpConfig};

    use super::*;
    use crate::InitSource;
    use fsdp_config::Resolved;

    fn job(dir: &std::path::Path, optimizer: &str) -> Job<Mlp> {
        let data = dir.join("tokens.bin");
        std::fs::write(&data, [0; 400]).unwrap();
        let text = format!(
            "model = {{ path = 'unused' }}\n\
             data = {{ train = ['{}'], format = 'tokens-u16', seq_len = 3 }}\n\
             train = {{ steps = 2, micro_batch_size = 1, global_batch_size = 4, \
             optimizer = {{ {optimizer} }} }}\n\
             fsdp = {{ wrap = ['MlpLayer'] }}\n\
             run = {{ ranks = 1, out_dir = 'unused' }}",
            data.display()
        );
        let sizes = MlpConfig { vocab: 7, widths: vec![3, 5, 4], bias: true, tied: false, std: 0.2 };
        let model = Mlp::new(&sizes).unwrap();
        let init = InitSource::Random { seed: 0, init: Arc::new(model.description().init.clone()) };
        Job::new(Resolved::parse(&text, "test", &[]).unwrap().config, model, init).unwrap()
    }

    #[test]
    fn param_groups_match_pytorch_layout_and_first_match_wins() {
        let dir = tempfile::tempdir().unwrap();
        let optimizer = "name = 'sgd', lr = 0.1, weight_decay = 0.3, no_decay = ['bias'], \
             group = [{ patterns = ['layers.0'], lr = 0.05 }, { patterns = ['layers'], weight_decay = 0.5 }]";
        let job = job(dir.path(), optimizer);
        let groups = param_groups(&job, 1);
        let number = |group: &Json, key: &str| group[key].as_f64().unwrap();
        let lr_and_decay: Vec<(f64, f64)> = groups
            .as_array()
            .unwrap()
            .iter()
            .map(|group| (number(group, "lr"), number(group, "weight_decay")))
            .collect();
        let names = |index: usize| groups[index]["params"].as_array().unwrap().clone();
        let all: Vec<String> = job.plan.spec.params.iter().map(|param| param.fqn.clone()).collect();
        let of = |keep: &dyn Fn(&str) -> bool| -> Vec<Json> {
            all.iter().filter(|name| keep(name)).map(|name| json!(name)).collect()
        };
        assert_eq!(names(0), of(&|name| !name.contains("layers") && !name.contains("bias")));
        assert_eq!(names(1), of(&|name| name.contains("layers.0")));
        assert_eq!(names(2), of(&|name| name.contains("layers") && !name.contains("layers.0")));
        assert_eq!(lr_and_decay[..3], [(0.1, 0.3), (0.1 * 0.5, 0.3), (0.1, 0.5)]);
    }

    #[test]
    fn sgd_nesterov_change_is_recorded_and_maximize_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let job = job(dir.path(), "name = 'sgd', lr = 0.1, momentum = 0.9");
        let count = job.plan.spec.params.len();
        let compared = |key: &str, value: bool| {
            let settings = BTreeMap::from([(key.to_owned(), Value::Bool(value))]);
            compare(&job, &Groups::uniform(0.0), &vec![settings; count], 5)
        };
        let change = Change {
            step: 5,
            key: "train.optimizer.nesterov".to_owned(),
            from: "true".to_owned(),
            to: "false".to_owned(),
        };
        assert_eq!(compared("nesterov", true).unwrap(), [change]);
        let refused = compared("maximize", true).unwrap_err();
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert_eq!(refused[0].what, "setting `maximize` of the optimizer");
        assert_eq!(compared("nesterov", false).unwrap(), []);
        assert_eq!(compared("maximize", false).unwrap(), []);
    }
}

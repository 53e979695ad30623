//! Adapters with another scale.

use fsdp_train::adapter;
use fsdp_train::audit::{Between, Setting, Variant, number};

use super::stated::Stated;
use crate::run_setup::Model;

pub(super) fn scale(stated: &Stated) -> Option<Setting<Model>> {
    let adapter = stated.setup.config.adapter.as_ref()?;
    let scale = |alpha: f64, rslora: bool| {
        alpha / if rslora { (adapter.rank as f64).sqrt() } else { adapter.rank as f64 }
    };
    let given = scale(adapter.alpha, adapter.rslora);
    let rank = adapter.rank as f64;
    let mut sizes: Vec<f64> = [given * 2.0, given / 2.0, scale(adapter.alpha, !adapter.rslora), 1.0]
        .into_iter()
        .chain([16.0, 32.0].map(|alpha| alpha / rank))
        .chain([adapter.alpha, given * given])
        .filter(|scale| (scale - given).abs() > 1e-9 * given)
        .collect();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup_by(|left, right| (*left - *right).abs() <= 1e-9 * *right);
    let setup = stated.setup.clone();
    let model = move |scale: f64| {
        let mut config = setup.config.clone();
        let adapter = config.adapter.as_mut()?;
        (adapter.alpha, adapter.rslora) = (scale * rank, false);
        let architecture = adapter::adapt(&config, setup.model.build().ok()?).ok()?;
        let text = format!("adapters are scaled by {}, the run file says {}", number(scale), number(given));
        Some(Variant { text, factor: Some(scale / given), architecture })
    };
    let between = Between::Logarithmic;
    Some(Setting { stated: Some(given), sizes, between, is_random: false, model: Box::new(model) })
}

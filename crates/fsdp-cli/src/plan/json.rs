//! A plan as JSON.

use fsdp_core::Queue;
use serde_json::{Value, json};

use super::Outlook;
use super::ahead::RunForecast;
use super::cost::Cost;
use super::effects::Effect;
use super::text::{assumptions, critical_kinds, sources, waits};

/// The complete plan as JSON.
pub(super) fn json(outlook: &Outlook<'_>) -> Value {
    let Outlook { ahead, cost, fsdp2, effects, again } = outlook;
    let [mfu, mfu_6n] = ahead.utilization();
    let memory: serde_json::Map<String, Value> = fsdp_core::memory::Category::ALL
        .iter()
        .map(|&category| (category.name().to_owned(), ahead.usage.device.peak(category).into()))
        .collect();
    let effect = |effect: &Effect| {
        json!({
            "change": effect.change, "step_seconds": effect.seconds, "device_bytes": effect.device_bytes, "fits": effect.fits,
        })
    };
    let queues: serde_json::Map<String, Value> =
        Queue::ALL.iter().map(|&queue| (queue.name().to_owned(), ahead.busy(queue).into())).collect();
    let critical = critical_kinds(ahead).into_iter().map(|(kind, count, seconds, longest)| {
        json!({ "operation": kind, "count": count, "seconds": seconds, "longest": longest })
    });
    json!({
        "cluster": ahead.cluster.name,
        "devices": ahead.plan.mesh.world(),
        "memory": {
            "peak_bytes": memory,
            "device_peak_bytes": ahead.usage.device.total_peak_bytes,
            "host_peak_bytes": ahead.usage.host.total_peak_bytes,
            "beside_bytes": ahead.beside_bytes(),
            "device_bytes": ahead.capacity(),
            "fits": ahead.fits(),
        },
        "step": {
            "seconds": ahead.forecast.seconds,
            "band_seconds": ahead.band,
            "computing_seconds": ahead.forecast.computing,
            "exposed_seconds": ahead.forecast.exposed,
            "straggling": ahead.forecast.straggling,
            "far_from_points": ahead.forecast.far,
            "tokens_per_second": ahead.tokens_per_second(),
            "fsdp2_seconds": fsdp2.map(|[compiled, eager]| json!({ "compiled": compiled, "eager": eager })),
            "mfu": mfu, "mfu_6n": mfu_6n, "hfu": mfu * again,
            "queue_seconds": queues,
            "waits": waits(ahead).into_iter().map(|(name, seconds)| json!({ "for": name, "seconds": seconds })).collect::<Vec<_>>(),
            "critical_path": critical.collect::<Vec<_>>(),
        },
        "other_settings": effects.iter().map(effect).collect::<Vec<_>>(),
        "run": run_json(cost),
        "assumed": assumptions(ahead),
        "sources": sources_json(ahead),
    })
}

/// The numbers that are not assumed, with their sources.
pub(super) fn sources_json(ahead: &RunForecast<'_>) -> Vec<Value> {
    let source = |[number, value, source]: [String; 3]| json!({ "number": number, "value": value.parse::<f64>().ok(), "source": source });
    sources(ahead).into_iter().map(source).collect()
}

/// The cost of the whole run.
pub(super) fn run_json(cost: &Cost) -> Value {
    json!({
        "tokens": cost.tokens,
        "steps": cost.steps,
        "seconds": cost.seconds,
        "seconds_with_failures": cost.whole.is_finite().then_some(cost.whole),
        "seconds_between_failures": cost.between_failures.is_finite().then_some(cost.between_failures),
        "save_every_seconds": cost.save_every.is_finite().then_some(cost.save_every),
        "save_stop_seconds": cost.save.stop,
        "save_write_seconds": cost.save.write,
        "lost": cost.lost(),
        "device_hours": cost.whole.is_finite().then(|| cost.device_hours()),
        "dollars": cost.whole.is_finite().then(|| cost.dollars()),
        "price": cost.price,
    })
}

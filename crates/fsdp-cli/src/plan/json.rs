//! A plan as JSON.

use fsdp_core::Queue;
use serde_json::{Value, json};

use super::ahead::RunForecast;
use super::cost::Cost;
use super::effects::Effect;
use super::outlook::Outlook;
use super::report::{assumptions, critical_kinds, sources, waits};

/// The complete plan as JSON.
pub(super) fn json(outlook: &Outlook<'_>) -> Value {
    let Outlook { run, cost, fsdp2, effects, recompute_factor, .. } = outlook;
    let [mfu, mfu_6n] = run.utilization();
    let memory: serde_json::Map<String, Value> = fsdp_core::memory::Category::ALL
        .iter()
        .map(|&category| (category.name().to_owned(), run.usage.device.peak(category).into()))
        .collect();
    let effect = |effect: &Effect| {
        json!({
            "change": effect.change, "step_seconds": effect.seconds, "device_bytes": effect.device_bytes, "fits": effect.fits,
        })
    };
    let queues: serde_json::Map<String, Value> =
        Queue::ALL.iter().map(|&queue| (queue.name().to_owned(), run.busy(queue).into())).collect();
    let critical = critical_kinds(run).into_iter().map(|(kind, count, seconds, longest)| {
        json!({ "operation": kind, "count": count, "seconds": seconds, "longest": longest })
    });
    json!({
        "cluster": run.cluster.name,
        "devices": run.plan.mesh.world(),
        "memory": {
            "peak_bytes": memory,
            "device_peak_bytes": run.usage.device.total_peak_bytes,
            "host_peak_bytes": run.usage.host.total_peak_bytes,
            "beside_bytes": run.beside_bytes(),
            "device_bytes": run.capacity(),
            "fits": run.fits(),
        },
        "step": {
            "seconds": run.forecast.seconds,
            "band_seconds": run.band,
            "computing_seconds": run.forecast.computing,
            "exposed_seconds": run.forecast.exposed,
            "straggling": run.forecast.straggling,
            "far_from_points": run.forecast.far,
            "tokens_per_second": run.tokens_per_second(),
            "fsdp2_seconds": fsdp2.map(|[compiled, eager]| json!({ "compiled": compiled, "eager": eager })),
            "mfu": mfu, "mfu_6n": mfu_6n, "hfu": mfu * recompute_factor,
            "queue_seconds": queues,
            "waits": waits(run).into_iter().map(|(name, seconds)| json!({ "for": name, "seconds": seconds })).collect::<Vec<_>>(),
            "critical_path": critical.collect::<Vec<_>>(),
        },
        "other_settings": effects.iter().map(effect).collect::<Vec<_>>(),
        "run": run_json(cost),
        "assumed": assumptions(run),
        "sources": sources_json(run),
    })
}

/// The numbers that are not assumed, with their sources.
pub(super) fn sources_json(run: &RunForecast<'_>) -> Vec<Value> {
    let source = |[number, value, source]: [String; 3]| json!({ "number": number, "value": value.parse::<f64>().ok(), "source": source });
    sources(run).into_iter().map(source).collect()
}

/// The cost of the whole run.
pub(super) fn run_json(cost: &Cost) -> Value {
    json!({
        "tokens": cost.tokens,
        "steps": cost.steps,
        "seconds": cost.seconds,
        "seconds_with_failures": cost.total_seconds.is_finite().then_some(cost.total_seconds),
        "seconds_between_failures": cost.between_failures.is_finite().then_some(cost.between_failures),
        "save_every_seconds": cost.save_every.is_finite().then_some(cost.save_every),
        "save_stop_seconds": cost.save.stop,
        "save_write_seconds": cost.save.write,
        "lost": cost.lost(),
        "device_hours": cost.total_seconds.is_finite().then(|| cost.device_hours()),
        "dollars": cost.total_seconds.is_finite().then(|| cost.dollars()),
        "price": cost.price,
    })
}

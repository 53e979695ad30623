use std::path::Path;
use std::sync::Arc;

use fsdp_comm::launch::Launcher;
use fsdp_config::Resolved;
use fsdp_core::engine::ProgramOrder;
use fsdp_core::out_of_memory::Size;
use fsdp_core::{Error, FailureKind};
use fsdp_nn::hf::{HfConfig, HfModel};
use fsdp_nn::{HostMemory, HostOptions, HostPool};
use fsdp_sim::{ThreadOptions, Threads};

use super::*;
use crate::{InitSource, RankTrainer};

/// A Llama model on bytes.
fn job(dir: &Path, ranks: usize, overrides: &[&str]) -> Job<HfModel> {
    let data = dir.join("data.txt");
    std::fs::write(&data, "what fits is not refused. ".repeat(100)).unwrap();
    let text = format!(
        "model = {{ path = 'unused' }}\ndata = {{ train = ['{}'], seq_len = 32 }}\n\
         train = {{ steps = 1, micro_batch_size = 1, global_batch_size = {ranks} }}\n\
         fsdp = {{ wrap = ['LlamaDecoderLayer'] }}\nrun = {{ ranks = {ranks}, out_dir = 'unused', threads = 2 }}",
        data.display()
    );
    let model = r#"{"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": true}"#;
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    let model = HfConfig::parse(model).unwrap().build().unwrap();
    let init = InitSource::Random { seed: 0, init: Arc::new(model.description().init.clone()) };
    Job::new(Resolved::parse(&text, "test", &overrides).unwrap().config, model, init).unwrap()
}

fn needed<A: Architecture + Clone>(job: &Job<A>, storage: Storage) -> u64 {
    let ranks = job.plan.mesh.world();
    parts((&job.config, &job.plan), ranks, storage, &job.forecast::<HostMemory>().unwrap())
        .iter()
        .map(|part| part.bytes)
        .sum()
}

fn left(bytes: u64) -> Option<Available> {
    Some(Available { bytes, limit: Limit::Machine })
}

#[test]
fn limited_address_space_must_hold_stacks_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), 4, &[]);
    let (bytes, stacks) = (needed(&job, Storage::Shared), 4 * (2 << 20));
    let fits = |bytes, limit| {
        let forecast = || job.forecast::<HostMemory>();
        expect(forecast, (&job.config, &job.plan), 4, Storage::Shared, Some(Available { bytes, limit }))
            .is_ok()
    };
    assert!(fits(bytes, Limit::Machine), "memory that is not touched is free");
    assert!(!fits(bytes + stacks - 1, Limit::AddressSpace));
    assert!(fits(bytes + stacks, Limit::AddressSpace));
}

/// Total bytes in the storage of all buffers, after two steps.
fn held(job: &Job<HfModel>, storage: Storage) -> u64 {
    let pool = HostPool::new();
    let mut world = ThreadOptions::default();
    (world.cores, world.share_unsharded) = (2, storage == Storage::Shared);
    let (shared, resident) = (Arc::clone(&pool), storage == Storage::Separate);
    let launcher = Threads::new(world, move |_, _| {
        let pool = Arc::clone(&shared);
        Ok::<_, Error>(Arc::new(HostMemory::new(HostOptions { pool, resident, ..HostOptions::default() })?))
    });
    let result = launcher.launch(job.plan.mesh.world(), &|seat| {
        let mut trainer = RankTrainer::new(job, seat)?;
        trainer.step(0, false, &mut ProgramOrder, &mut ())?;
        trainer.step(1, false, &mut ProgramOrder, &mut ()).map(drop)
    });
    result.unwrap_or_else(|error| panic!("{}", TrainError::from(error)));
    pool.held_bytes() as u64
}

#[test]
fn predicted_need_never_exceeds_memory_actually_held() {
    let dir = tempfile::tempdir().unwrap();
    for storage in [Storage::Shared, Storage::Separate] {
        // Only with shared storage does the prediction depend on the number of ranks and on their exceeding the number
        // of cores.
        let worlds: &[usize] = if storage == Storage::Shared { &[1, 2, 8, 32] } else { &[1, 2, 8] };
        for &ranks in worlds {
            for overrides in [
                &[][..],
                &["fsdp.activation_checkpointing=full"],
                &["fsdp.wrap=[]"],
                &["fsdp.param_dtype=bf16", "fsdp.reshard_after_forward=true"],
            ] {
                let job = job(dir.path(), ranks, overrides);
                let (needed, held) = (needed(&job, storage), held(&job, storage));
                let case = format!("{storage:?}, {ranks} ranks, {overrides:?}: {needed} of {held}");
                assert!(needed <= held, "{case}");
                // The prediction also covers most of it, if ranks wait for each other often enough.
                assert!(5 * needed > 3 * held || !overrides.is_empty(), "{case}");
            }
        }
    }
}

#[test]
fn memory_check_is_byte_exact() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), 2, &[]);
    let needed = needed(&job, Storage::Shared);
    let world = job.plan.mesh.world();
    let expect = |available| {
        let forecast = || job.forecast::<HostMemory>();
        expect(forecast, (&job.config, &job.plan), world, Storage::Shared, available)
    };
    assert!(expect(left(needed)).is_ok());
    assert!(expect(None).is_ok(), "where nothing is known, allocation decides");
    let error = expect(left(needed - 1)).unwrap_err();
    assert_eq!(error.kind(), FailureKind::Input);
    let said = format!("2 ranks need {} of memory at once, but ", Size(usize::try_from(needed).unwrap()));
    assert!(error.to_string().starts_with(&said), "{error}");
}

#[test]
fn need_of_one_rank_matches_ledger_prediction() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), 1, &[]);
    let predicted = job.predict::<HostMemory>(fsdp_core::Rank(0)).unwrap().device.total_peak_bytes as u64;
    assert_eq!(needed(&job, Storage::Separate), predicted);
    assert!(needed(&job, Storage::Shared) <= predicted, "storage goes from hand to hand");
}

#[test]
fn checkpointing_adds_copy_of_state_to_need() {
    let dir = tempfile::tempdir().unwrap();
    let [without, with] = [&[][..], &["checkpoint.every=5"]].map(|overrides| job(dir.path(), 2, overrides));
    // Parameters and two moments, in single precision.
    let shards = without.forecast::<HostMemory>().unwrap().shard_elements as u64;
    assert_eq!(needed(&with, Storage::Shared) - needed(&without, Storage::Shared), 2 * 3 * 4 * shards);
}

#[test]
fn shortage_message_lists_needs_and_remedies() {
    let part = |name, per_rank_bytes, bytes| Part { name, per_rank_bytes, bytes };
    let parts = vec![part("parameter shards", 512, 1024), part("unsharded slots", 3 << 30, 3 << 30)];
    let available = left(2 << 20).unwrap();
    assert_eq!(
        shortage(&parts, 2, (3 << 30) + 1024, &available),
        "2 ranks need 3.0 GiB of memory at once, but this machine leaves 2.0 MiB\n\
         \x20 parameter shards   512 bytes per rank,    1.0 KiB in all\n\
         \x20 unsharded slots      3.0 GiB per rank,    3.0 GiB in all\n\
         Lower train.micro_batch_size, data.seq_len or run.ranks, recompute (fsdp.activation_checkpointing = \"full\"), \
         wrap smaller units (fsdp.wrap), or use a smaller model or a machine with more memory"
    );
}

#[test]
fn remote_ranks_need_no_local_memory() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), 4, &[]);
    let forecast = job.forecast::<HostMemory>().unwrap();
    let bytes = |ranks| -> u64 {
        parts((&job.config, &job.plan), ranks, Storage::Shared, &forecast).iter().map(|part| part.bytes).sum()
    };
    let world = job.plan.mesh.world();
    assert!(world > 1 && (1..world).all(|ranks| bytes(ranks) < bytes(ranks + 1)));
}

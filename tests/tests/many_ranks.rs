//! Far more ranks than cores, in one process.

use std::sync::Arc;

use fsdp_core::engine::ProgramOrder;
use fsdp_nn::model::{Mlp, MlpConfig};
use fsdp_nn::{HostMemory, HostOptions, HostPool};
use fsdp_sim::Threads;
use fsdp_train::verify::{VerifyOptions, verify};

use crate::runs::train;
use crate::support::{LLAMA, config, job, job_of, options, threads_with};

const OVERRIDES: [&str; 3] = ["run.ranks=64", "train.micro_batch_size=1", "train.global_batch_size=64"];

#[test]
fn sixty_four_ranks_sharing_storage_match_oracle_bitwise() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options();
    options.share_unsharded = true;
    let wrap = "fsdp.wrap=[\"LlamaDecoderLayer\"]";
    let job = job(LLAMA, config(dir.path(), 61, &[&OVERRIDES[..], &[wrap]].concat()));
    let report = verify(&job, &threads_with(options), &VerifyOptions::new(&[64], 2)).unwrap();
    assert!(report.holds(), "{:#?}", report.worlds[0].failures);
    assert_eq!(report.worlds[0].promise, "equal bits (D2)");
}

#[test]
fn sixty_four_ranks_mostly_without_rows_pass_verification() {
    let dir = tempfile::tempdir().unwrap();
    let sizes = MlpConfig { vocab: 3, widths: vec![5, 2, 5], bias: true, tied: true, std: 0.5 };
    let mesh = ["fsdp.wrap=[\"MlpLayer\"]", "fsdp.mesh={ replicate = 4 }"];
    let config = config(dir.path(), 3, &[&OVERRIDES[..], &mesh].concat());
    let job = job_of(Mlp::new(&sizes).unwrap(), config);
    let report = verify(&job, &threads_with(options()), &VerifyOptions::new(&[64], 2)).unwrap();
    assert!(report.holds(), "{:#?}", report.worlds[0].failures);
}

/// Measures the storage of all buffers rather than what ranks count: ranks share gathered units, and return storage
/// while others compute. Most of it holds gradients that wait for their sibling in the tree.
#[test]
fn shared_storage_of_256_ranks_is_fraction_of_counted_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let sizes =
        ["run.ranks=256", "train.micro_batch_size=1", "train.global_batch_size=256", "data.seq_len=2"];
    let policies =
        ["fsdp.wrap=[\"LlamaDecoderLayer\", \"Embedding\"]", "fsdp.activation_checkpointing=\"full\""];
    let wide = LLAMA
        .replace("61", "1024")
        .replace("\"hidden_size\": 24", "\"hidden_size\": 64")
        .replace("\"intermediate_size\": 20", "\"intermediate_size\": 256");
    let jobs = [job(&wide, config(dir.path(), 1024, &[&sizes[..], &policies].concat()))];
    let (pool, mut world) = (HostPool::new(), options());
    (world.share_unsharded, world.cores) = (true, 2);
    let shared = Arc::clone(&pool);
    let launcher = Threads::new(world, move |_, _| {
        let options = HostOptions { pool: Arc::clone(&shared), ..HostOptions::default() };
        Ok(Arc::new(HostMemory::new(options)?))
    });
    let ranks = train(&jobs, &launcher, 2, |_| Box::new(ProgramOrder)).unwrap();
    assert!(ranks.iter().all(|rank| rank.reports == ranks[0].reports));
    let counted: usize = ranks.iter().map(|rank| rank.usage[1].device.total_peak_bytes).sum();
    let unsharded = jobs[0].plan.spec.elements() * 4 * ranks.len();
    let held = pool.held_bytes();
    assert!(5 * held < counted && 2 * held < unsharded, "{held} of {counted}, model {unsharded}");
}

//! More ranks than cores by far, in one process.

use fsdp_nn::model::{Mlp, MlpConfig};
use fsdp_train::verify::{VerifyOptions, verify};

use crate::support::{LLAMA, config, job, job_of, options, threads_with};

const OVERRIDES: [&str; 3] = ["run.ranks=64", "train.micro_batch_size=1", "train.global_batch_size=64"];

#[test]
fn sixty_four_ranks_that_share_storage_train_as_one() {
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
fn most_of_sixty_four_ranks_may_own_no_row_of_a_parameter() {
    let dir = tempfile::tempdir().unwrap();
    let sizes = MlpConfig { vocab: 3, widths: vec![5, 2, 5], bias: true, tied: true, std: 0.5 };
    let mesh = ["fsdp.wrap=[\"MlpLayer\"]", "fsdp.mesh={ replicate = 4 }"];
    let config = config(dir.path(), 3, &[&OVERRIDES[..], &mesh].concat());
    let job = job_of(Mlp::new(&sizes).unwrap(), config);
    let report = verify(&job, &threads_with(options()), &VerifyOptions::new(&[64], 2)).unwrap();
    assert!(report.holds(), "{:#?}", report.worlds[0].failures);
}

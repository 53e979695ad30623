//! A single rank writes a non-finite value: all ranks end at the same step, and the error names the location.

use std::sync::Mutex;

use fsdp_comm::launch::{FailureReason, Launcher};
use fsdp_config::Resolved;
use fsdp_core::DType;
use fsdp_core::engine::{Origin, ProgramOrder};
use fsdp_core::memory::{Buffer, HostSliceMut, Memory, Slice};
use fsdp_core::{Axis, FailureKind, Queue};
use fsdp_nn::model::{Mlp, MlpConfig};
use fsdp_nn::{HostMemory, HostOptions};
use fsdp_sim::{ThreadOptions, Threads};

use super::*;
use crate::InitSource;

/// Number of tokens in the data; the model knows two more, whose embedding rows no batch reads.
const TOKENS: u16 = 7;

/// The last row of the embedding.
const UNREAD_ROW: usize = 8;

/// Weight decay makes the values of the embedding grow without bound.
const SGD: &str = "{ name = 'sgd', lr = 1.0, weight_decay = 3.0 }";

type Trainer<'a> = RankTrainer<'a, HostMemory, Mlp>;

fn job(dir: &std::path::Path, optimizer: &str, [fsdp, ranks]: [&str; 2]) -> Job<Mlp> {
    let data = dir.join("tokens.bin");
    let tokens = (0..200).flat_map(|i: u16| (i * i % TOKENS).to_le_bytes());
    std::fs::write(&data, tokens.collect::<Vec<u8>>()).unwrap();
    let text = format!(
        "model = {{ path = 'unused' }}\n\
         data = {{ train = ['{0}'], eval = ['{0}'], format = 'tokens-u16', seq_len = 3 }}\n\
         train = {{ steps = 4, micro_batch_size = 1, global_batch_size = 4, optimizer = {optimizer}, \
         lr_schedule = {{ name = 'constant' }} }}\n\
         fsdp = {{ wrap = ['MlpLayer'], {fsdp} }}\n\
         run = {{ ranks = {ranks}, out_dir = 'unused' }}",
        data.display()
    );
    let sizes = MlpConfig { vocab: UNREAD_ROW + 1, widths: vec![3, 5], bias: true, tied: false, std: 0.2 };
    let model = Mlp::new(&sizes).unwrap();
    let init = InitSource::Random { seed: 0, init: Arc::new(model.description().init.clone()) };
    let parsed = Resolved::parse(&text, "test", &[]).unwrap_or_else(|error| panic!("{error}"));
    Job::new(parsed.config, model, init).unwrap()
}

/// Meshes and policies: number of ranks, and keys of `fsdp`.
const CASES: [[&str; 2]; 7] = [
    ["mesh = { replicate = 1 }", "1"],
    ["mesh = { replicate = 1 }", "2"],
    ["mesh = { replicate = 1 }", "4"],
    ["mesh = { replicate = 2 }", "4"],
    ["mesh = { replicate = 2 }, offload = 'cpu'", "4"],
    ["reshard_after_forward = false, offload = 'cpu'", "2"],
    ["param_dtype = 'bf16', mesh = { replicate = 2 }", "4"],
];

fn launcher() -> Threads<HostMemory> {
    Threads::new(ThreadOptions::default(), |_, _| {
        let options = HostOptions { poison: true, resident: true, ..HostOptions::default() };
        Ok(Arc::new(HostMemory::new(options)?))
    })
}

/// Runs all ranks; returns the first one that failed, its error, and the messages of all.
fn failure(
    job: &Job<Mlp>,
    rank: impl Fn(&mut Trainer<'_>) -> Result<(), TrainError> + Sync,
) -> (Rank, TrainError, Vec<String>) {
    let errors = Mutex::new(vec![String::new(); job.plan.mesh.world()]);
    let ended = launcher().launch(job.plan.mesh.world(), &|seat: Seat<HostMemory>| {
        let mut trainer = RankTrainer::new(job, seat)?;
        let result = rank(&mut trainer);
        result.inspect_err(|error| errors.lock().unwrap()[trainer.rank().0] = error.to_string())
    });
    let failure = ended.unwrap_err();
    let FailureReason::Error(error) = failure.reason else { panic!("{failure:?}") };
    (failure.rank, error, errors.into_inner().unwrap())
}

/// Puts a value into chosen rows of parameters in the last replica. Returns whether this rank holds one of them.
fn put(trainer: &mut Trainer<'_>, value: f64, is_chosen: impl Fn(&str, usize) -> bool) -> bool {
    let job = trainer.job;
    let is_last =
        job.plan.mesh.coordinate(trainer.rank(), Axis::Replicate) + 1 == job.plan.mesh.size(Axis::Replicate);
    let mut holds = false;
    let filled = trainer.engine.load_params(Origin::Computed, |piece, values| {
        job.init.fill(&job.plan.spec, piece, values)?;
        let first = piece.param_offset / piece.row_len;
        for (row, values) in values.chunks_mut(piece.row_len).enumerate() {
            if is_last && is_chosen(&job.plan.spec.param(piece.param).fqn, first + row) {
                values[1] = value;
                holds = true;
            }
        }
        Ok::<_, TrainError>(())
    });
    filled.unwrap();
    holds
}

/// Puts a value into an embedding row that no batch reads.
fn put_in_unread_row(trainer: &mut Trainer<'_>, value: f64) -> bool {
    put(trainer, value, |name, row| name == "embed.weight" && row == UNREAD_ROW)
}

/// Parameters and state, as bits.
fn contents(trainer: &Trainer<'_>) -> Vec<Vec<u64>> {
    let mut all = Vec::new();
    for unit in trainer.job.plan.layout.unit_ids() {
        let shards = trainer.engine.shards(unit);
        for buffer in shards.params.iter().chain(shards.state.iter().flatten()) {
            let mut values = vec![0.0; buffer.len()];
            let memory = trainer.engine.memory();
            memory.read(Queue::Compute, Slice::whole(buffer), HostSliceMut::F64(&mut values)).unwrap();
            all.push(values.into_iter().map(f64::to_bits).collect());
        }
    }
    all
}

fn step(trainer: &mut Trainer<'_>, number: u64) -> Result<StepReport, TrainError> {
    trainer.step(number, false, &mut ProgramOrder, &mut ())
}

/// Asserts that the rank that holds the value failed because of it, and the others because of that rank.
fn assert_reported(
    (rank, error, errors): (Rank, TrainError, Vec<String>),
    holder: Option<usize>,
    what: &str,
) {
    assert_eq!(Some(rank.0), holder, "{what}: {error}");
    for (other, message) in errors.iter().enumerate().filter(|(other, _)| *other != rank.0) {
        assert_eq!(*message, format!("{rank} failed: {error}"), "rank {other}, {what}");
    }
}

#[test]
fn non_finite_parameter_on_one_rank_fails_all_in_next_step() {
    for case in CASES {
        let dir = tempfile::tempdir().unwrap();
        let job = job(dir.path(), SGD, case);
        for ahead in [false, true] {
            let holder = Mutex::new(None);
            let failed = failure(&job, |trainer| {
                if put_in_unread_row(trainer, -2e38) {
                    *holder.lock().unwrap() = Some(trainer.rank().0);
                }
                let report = step(trainer, 0)?;
                assert!(report.finite && report.state_finite, "it is known one step later");
                let before = contents(trainer);
                trainer.issue(1, false, &mut ProgramOrder, &mut ())?;
                if ahead {
                    trainer.issue(2, false, &mut ProgramOrder, &mut ())?;
                }
                let error = trainer.report().unwrap_err();
                assert_eq!(contents(trainer), before, "nothing is updated any more");
                Err(error)
            });
            let TrainError::StateNotFinite { step: 1, ref tensor, ref index, value, dtype } = failed.1 else {
                panic!("{case:?}: {}", failed.1);
            };
            assert_eq!((tensor.as_str(), &index[..]), ("embed.weight", &[UNREAD_ROW, 1][..]), "{case:?}");
            assert_eq!((value, dtype), (f64::INFINITY, job.plan.policy.param_dtype), "{case:?}");
            assert_eq!(failed.1.kind(), FailureKind::Permanent);
            assert_reported(failed, holder.into_inner().unwrap(), &format!("{case:?}"));
        }
    }
}

#[test]
fn non_finite_optimizer_state_is_named_as_in_checkpoints() {
    for case in CASES {
        let dir = tempfile::tempdir().unwrap();
        let job = job(dir.path(), "{ name = 'adamw', lr = 1e-3 }", case);
        let culprit = job.plan.mesh.world() - 1;
        let failed = failure(&job, |trainer| {
            if trainer.rank().0 == culprit {
                // As if a square had overflowed.
                let mut left = true;
                let filled = trainer.engine.load_state(Origin::Computed, |tensor, _, values| {
                    if tensor.name == "exp_avg_sq" && std::mem::take(&mut left) {
                        *values.last_mut().unwrap() = f64::INFINITY;
                    }
                    Ok::<_, TrainError>(())
                });
                filled.unwrap();
            }
            step(trainer, 0)?;
            step(trainer, 1).map(drop)
        });
        let TrainError::StateNotFinite { step: 1, ref tensor, value, dtype, .. } = failed.1 else {
            panic!("{case:?}: {}", failed.1);
        };
        assert!(tensor.starts_with("optim.state.") && tensor.ends_with(".exp_avg_sq"), "{tensor}");
        assert_eq!((value, dtype), (f64::INFINITY, DType::F32));
        assert_reported(failed, Some(culprit), &format!("{case:?}"));
    }
}

#[test]
fn check_state_between_steps_fails_on_all_ranks() {
    for case in CASES {
        let dir = tempfile::tempdir().unwrap();
        let job = job(dir.path(), SGD, case);
        let holder = Mutex::new(None);
        let failed = failure(&job, |trainer| {
            trainer.check_state(0).expect("nothing was written");
            step(trainer, 0)?;
            trainer.check_state(1).expect("all of it is finite");
            if put_in_unread_row(trainer, 2e38) {
                *holder.lock().unwrap() = Some(trainer.rank().0);
            }
            step(trainer, 1)?;
            trainer.check_state(2)
        });
        assert!(matches!(failed.1, TrainError::StateNotFinite { step: 2, .. }), "{case:?}: {}", failed.1);
        assert_reported(failed, holder.into_inner().unwrap(), &format!("{case:?}"));
    }
}

#[test]
fn overflow_only_in_low_precision_copy_names_dtype_of_copy() {
    let dir = tempfile::tempdir().unwrap();
    let optimizer = "{ name = 'sgd', lr = 1.0, weight_decay = 0.0 }";
    let value = f64::from(f32::from_bits(0x7f7f_8000));
    let run = |job: &Job<Mlp>| {
        let ended = launcher().launch(2, &|seat: Seat<HostMemory>| {
            let mut trainer = RankTrainer::new(job, seat)?;
            put_in_unread_row(&mut trainer, value);
            step(&mut trainer, 0)?;
            trainer.check_state(1)
        });
        ended.map(drop).map_err(|failure| TrainError::from(failure).to_string())
    };
    run(&job(dir.path(), optimizer, ["param_dtype = 'f32'", "2"])).unwrap();
    let error = run(&job(dir.path(), optimizer, ["param_dtype = 'bf16'", "2"])).unwrap_err();
    assert_eq!(
        error,
        "rank 1 failed: step 1 wrote 3.39617752923046e38 to embed.weight, at [8, 1]: not finite in bf16; \
         this state was neither saved nor exported. Lower the learning rate, or clip gradients \
         (train.grad_clip)"
    );
}

#[test]
fn overflowing_evaluation_is_error_unless_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), SGD, ["mesh = { replicate = 2 }", "4"]);
    let evaluate = |trainer: &mut Trainer<'_>, stop| {
        trainer.evaluate(3, &AtomicBool::new(stop), &mut ProgramOrder, &mut ())
    };
    let failed = failure(&job, |trainer| {
        let evaluations = evaluate(trainer, false)?.unwrap();
        assert!(evaluations[0].loss.is_finite());
        put(trainer, 3e38, |name, _| name == "embed.weight" || name == "head.weight");
        assert_eq!(evaluate(trainer, true)?, None);
        trainer.check_state(3).expect("parameters are finite");
        evaluate(trainer, false).map(drop)
    });
    assert!(matches!(failed.1, TrainError::EvaluationNotFinite { step: 3, .. }), "{}", failed.1);
    assert_eq!(failed.1.kind(), FailureKind::Permanent);
    let is_expected = |error: &String| error.contains("evaluation on \"eval\" after step 3: loss NaN: ");
    assert!(failed.2.iter().all(is_expected), "{:?}", failed.2);
}

#[test]
fn evaluation_after_non_finite_state_reports_state() {
    let dir = tempfile::tempdir().unwrap();
    let job = job(dir.path(), SGD, ["mesh = { replicate = 1 }", "2"]);
    let failed = failure(&job, |trainer| {
        put_in_unread_row(trainer, 2e38);
        step(trainer, 0)?;
        trainer.evaluate(1, &AtomicBool::new(false), &mut ProgramOrder, &mut ()).map(drop)
    });
    assert!(matches!(failed.1, TrainError::StateNotFinite { step: 1, .. }), "{}", failed.1);
}

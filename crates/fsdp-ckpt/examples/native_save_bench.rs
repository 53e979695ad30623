//! Saves a training state as a native checkpoint and says how long that took: `native_save_bench DIR RANKS MIB`.
//!
//! Ranks are threads. The state is in memory, as it is while training: for every parameter itself and two
//! moments. The time runs from the first file to the final name, everything being durable. Element `i` of
//! tensor number `t` is `i % 2^20 + t`, so that others can check what they read. `bench/native_save.sh`
//! compares the time with that of `dd`.

use std::{env, error::Error, process::ExitCode, thread, time::Instant};

use fsdp_ckpt::{
    checkpoint::{Key, Role},
    native::{Attempt, RankReport, RankSave, RunDir, SavePlan, SaveSpace, SavedTensor, even_rows},
    safetensors::{TensorSpec, TensorType},
};

type AnyError = Box<dyn Error + Send + Sync>;

const COLUMNS: usize = 1024;
/// Rows of each tensor: 16 MiB of `F32`.
const ROWS: usize = 4096;
const TENSOR_MIB: usize = 16;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("native_save_bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), AnyError> {
    let [dir, ranks, mib] =
        env::args().skip(1).collect::<Vec<_>>().try_into().map_err(|_| "DIR RANKS MIB")?;
    let (ranks, mib): (usize, usize) = (ranks.parse()?, mib.parse()?);
    let plan = SavePlan::new(ranks, tensors(mib.div_ceil(TENSOR_MIB), ranks))?;
    let state: Vec<Vec<Vec<u8>>> = (0..ranks).map(|rank| shards(&plan, rank)).collect();
    let run = RunDir::new(dir);
    let lock = run.lock()?;
    lock.remove_leftovers()?;
    let step = run.newest()?.map_or(1, |(step, _)| step + 1);
    lock.reserve(&SaveSpace::new(&plan)?)?;
    let (begin, attempt) = (Instant::now(), lock.attempt());
    let reports = thread::scope(|scope| -> Result<Vec<_>, AnyError> {
        let ranks: Vec<_> = (0..ranks)
            .map(|rank| {
                let (run, plan, state) = (&run, &plan, &state[rank]);
                scope.spawn(move || save(run, attempt, plan, step, rank, state))
            })
            .collect();
        let join =
            |rank: thread::ScopedJoinHandle<'_, Result<RankReport, fsdp_ckpt::Error>>| match rank.join() {
                Ok(saved) => saved.map_err(AnyError::from),
                Err(_) => Err("a rank panicked".into()),
            };
        ranks.into_iter().map(join).collect()
    })?;
    lock.commit(&plan, step, serde_json::Map::new(), reports)?;
    let seconds = begin.elapsed().as_secs_f64();
    let bytes: usize = state.iter().flatten().map(Vec::len).sum();
    println!("{bytes} bytes {ranks} ranks {seconds:.3} s {:.0} MB/s", bytes as f64 / seconds / 1e6);
    Ok(())
}

/// A parameter and its two moments, and so on.
fn tensors(count: usize, ranks: usize) -> Vec<SavedTensor> {
    let tensor = |index: usize| {
        let parameter = format!("layers.{}.weight", index / 3);
        let (name, role) = match index % 3 {
            0 => (parameter, Role::Model),
            1 => (format!("optim.state.{parameter}.exp_avg"), Role::Optimizer),
            _ => (format!("optim.state.{parameter}.exp_avg_sq"), Role::Optimizer),
        };
        let spec = TensorSpec { name: name.clone(), dtype: TensorType::F32, shape: vec![ROWS, COLUMNS] };
        SavedTensor { spec, path: vec![Key::Name(name)], role, rows: even_rows(ROWS, ranks) }
    };
    (0..count).map(tensor).collect()
}

/// What a rank holds, by tensor.
fn shards(plan: &SavePlan, rank: usize) -> Vec<Vec<u8>> {
    let shard = |(index, tensor): (usize, &SavedTensor)| {
        let rows = &tensor.rows[rank];
        let elements = rows.start * COLUMNS..rows.end * COLUMNS;
        elements.flat_map(|element| ((element % (1 << 20) + index) as f32).to_le_bytes()).collect()
    };
    plan.tensors().iter().enumerate().map(shard).collect()
}

fn save(
    run: &RunDir,
    attempt: Attempt,
    plan: &SavePlan,
    step: u64,
    rank: usize,
    state: &[Vec<u8>],
) -> Result<RankReport, fsdp_ckpt::Error> {
    let mut part = RankSave::create(run, attempt, plan, step, rank)?;
    for (tensor, bytes) in plan.tensors().iter().zip(state) {
        part.write_rows(&tensor.spec.name, tensor.rows[rank].start, bytes)?;
    }
    part.finish()
}

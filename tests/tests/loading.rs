//! Starting several replicas from files: the first replica reads, and all hold the same bits.
//!
//! Ranks that must not read get files that were truncated after they were opened, so that any read fails.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fsdp_ckpt::export::ExportPlan;
use fsdp_ckpt::model_files::ModelReader;
use fsdp_ckpt::native::{NativeReader, RunDir};
use fsdp_ckpt::safetensors::{TensorSpec, TensorType};
use fsdp_ckpt::training::ModelWeights;
use fsdp_comm::launch::{FailureReason, Launcher, Seat};
use fsdp_core::Rank;
use fsdp_core::comm::Traffic;
use fsdp_core::model::{ParamId, ParamSpec};
use fsdp_core::update::Piece;
use fsdp_nn::HostMemory;
use fsdp_nn::hf::{FAMILIES, HfConfig, HfModel};
use fsdp_nn::model::Architecture;
use fsdp_train::train::{Resume, train};
use fsdp_train::verify::{VerifyOptions, verify};
use fsdp_train::{InitSource, Job, RankTrainer, TrainError};

use crate::runs::state;
use crate::support::{LLAMA, config, job, run_options, threads};

/// The state of a rank before the first step, and its communication up to there.
type Start = (Vec<Vec<u64>>, Traffic);

const REPLICAS: [&str; 2] = ["run.ranks=4", "fsdp.mesh={ replicate = 2 }"];

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/llama-gqa")
}

/// Copies the golden weights.
fn weights(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    fs::copy(golden().join("model.safetensors"), &path).unwrap();
    path
}

/// Creates the job of the golden model, with its weights opened.
fn job_with(weights: &Path, dir: &Path, overrides: &[&str]) -> Job<HfModel> {
    let text = fs::read_to_string(golden().join("config.json")).unwrap();
    let architecture = HfConfig::parse(&text).unwrap().build().unwrap();
    let init = InitSource::Pretrained(Arc::new(ModelWeights::open(weights).unwrap()));
    let overrides: Vec<&str> =
        ["fsdp.wrap=[\"LlamaDecoderLayer\"]"].iter().chain(overrides).copied().collect();
    Job::new(config(dir, 7, &overrides), architecture, init).unwrap_or_else(|error| panic!("{error}"))
}

/// Truncates a file, or every file of a folder, to half its length.
fn cut(path: &Path) {
    if path.is_dir() {
        return fs::read_dir(path).unwrap().for_each(|entry| cut(&entry.unwrap().path()));
    }
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
}

/// Creates the trainers of all ranks and returns their state; if a rank fails, the errors of all in rank order.
fn start(
    ranks: usize,
    trainer: impl Fn(Seat<HostMemory>) -> Result<(Vec<Vec<u64>>, Traffic), TrainError> + Sync,
) -> Result<Vec<Start>, (Rank, FailureReason<TrainError>, Vec<String>)> {
    let errors = Mutex::new(vec![String::new(); ranks]);
    let ended = threads().launch(ranks, &|seat: Seat<HostMemory>| {
        let rank = seat.rank;
        trainer(seat).inspect_err(|error| errors.lock().unwrap()[rank.0] = error.to_string())
    });
    ended.map_err(|failure| (failure.rank, failure.reason, errors.into_inner().unwrap()))
}

fn from_weights<'a>(
    job_of: impl Fn(Rank) -> &'a Job<HfModel> + Sync,
) -> impl Fn(Seat<HostMemory>) -> Result<Start, TrainError> + Sync {
    move |seat| {
        let trainer = RankTrainer::new(job_of(seat.rank), seat)?;
        Ok((state(&trainer)?, trainer.traffic()))
    }
}

#[test]
fn only_first_replica_reads_weights_and_all_hold_them() {
    for more in [&[][..], &["fsdp.offload=\"cpu\""], &["fsdp.param_dtype=\"bf16\""]] {
        let dir = tempfile::tempdir().unwrap();
        let overrides: Vec<&str> = REPLICAS.iter().chain(more).copied().collect();
        let good = job_with(&weights(dir.path(), "good"), dir.path(), &overrides);
        let damaged = weights(dir.path(), "damaged");
        let damaged_job = job_with(&damaged, dir.path(), &overrides);
        cut(&damaged);
        let held = start(4, from_weights(|rank| if rank.0 < 2 { &good } else { &damaged_job })).unwrap();
        assert_eq!(held[0].0, held[2].0, "{more:?}");
        assert_eq!(held[1].0, held[3].0, "{more:?}");

        let one: Vec<&str> = ["run.ranks=2"].iter().chain(more).copied().collect();
        let one = job_with(&weights(dir.path(), "one"), dir.path(), &one);
        let alone = start(2, from_weights(|_| &one)).unwrap();
        assert_eq!([&held[0].0, &held[1].0], [&alone[0].0, &alone[1].0], "as without replicas: {more:?}");
        assert_eq!(alone[0].1.broadcasts, 0, "nobody else needs them");
    }
}

#[test]
fn read_error_of_first_replica_is_reported_to_waiting_rank() {
    for culprit in [0, 1] {
        let dir = tempfile::tempdir().unwrap();
        let good = job_with(&weights(dir.path(), "good"), dir.path(), &REPLICAS);
        let damaged = weights(dir.path(), "damaged");
        let damaged_job = job_with(&damaged, dir.path(), &REPLICAS);
        cut(&damaged);
        let failed = start(4, from_weights(|rank| if rank.0 == culprit { &damaged_job } else { &good }));
        let (rank, reason, errors) = failed.unwrap_err();
        assert_eq!(rank, Rank(culprit));
        let FailureReason::Error(TrainError::Checkpoint(error)) = &reason else { panic!("{reason:?}") };
        assert!(error.to_string().contains("damaged"), "{error}");
        let waiting = &errors[culprit + 2];
        assert_eq!(*waiting, format!("rank {culprit} failed: {reason}"), "who waits for it is told");
    }
}

#[test]
fn loaded_weights_are_broadcast_once_and_computed_never() {
    let dir = tempfile::tempdir().unwrap();
    let read = job_with(&weights(dir.path(), "weights"), dir.path(), &REPLICAS);
    let held = start(4, from_weights(|_| &read)).unwrap();
    let elements: usize = held[0].0.iter().map(Vec::len).sum::<usize>() / 3;
    for (_, traffic) in &held {
        // Half of the f32 bytes of a shard; with AdamW a rank holds three of its size. A unit is one segment.
        assert_eq!((traffic.broadcasts, traffic.broadcast_bytes), (3, 2 * elements as u64));
    }
    let computed = job(LLAMA, config(dir.path(), 61, &REPLICAS));
    let held = start(4, from_weights(|_| &computed)).unwrap();
    assert!(held.iter().all(|(_, traffic)| traffic.broadcasts == 0));
}

#[test]
fn verify_passes_on_replicas_with_loaded_weights() {
    let dir = tempfile::tempdir().unwrap();
    let job = job_with(&weights(dir.path(), "weights"), dir.path(), &REPLICAS);
    let report = verify(&job, &threads(), &VerifyOptions::new(&[4], 2)).unwrap();
    assert!(report.holds(), "{:?}", report.worlds[0].failures);
    let lines: Vec<&str> = report.worlds[0].traffic.iter().map(|line| line.collective).collect();
    assert_eq!(lines, ["all-gather", "reduce-scatter", "all-reduce", "broadcast"]);
}

/// Saves a checkpoint after two steps, and copies it.
fn checkpoints(dir: &Path, optimizer: &str) -> [PathBuf; 2] {
    let out = dir.join("out");
    let overrides = [REPLICAS[0], REPLICAS[1], optimizer, "train.steps=2", "checkpoint.every=2"];
    train(&job(LLAMA, config(dir, 61, &overrides)), &threads(), &run_options(Resume::Fresh)).unwrap();
    let (good, damaged) = (RunDir::new(out).checkpoint(2), dir.join("damaged"));
    fs::create_dir(&damaged).unwrap();
    for file in fs::read_dir(&good).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), damaged.join(file.file_name())).unwrap();
    }
    [good, damaged]
}

#[test]
fn only_first_replica_reads_checkpoint_and_all_resume() {
    for optimizer in ["{ name = \"adamw\", lr = 1e-3 }", "{ name = \"adafactor\" }"] {
        let dir = tempfile::tempdir().unwrap();
        let optimizer = format!("train.optimizer={optimizer}");
        let [good, damaged] = checkpoints(dir.path(), &optimizer);
        let readers = [&good, &damaged].map(|path| NativeReader::open(path).unwrap());
        cut(&damaged);
        let overrides = [REPLICAS[0], REPLICAS[1], &optimizer];
        let job = job(LLAMA, config(dir.path(), 61, &overrides));
        let resume = |damaged: fn(Rank) -> bool| {
            let readers = &readers;
            let job = &job;
            start(4, move |seat| {
                let reader = &readers[usize::from(damaged(seat.rank))];
                let trainer = RankTrainer::resume(job, seat, reader)?;
                Ok((state(&trainer)?, trainer.traffic()))
            })
        };
        let held = resume(|rank| rank.0 >= 2).unwrap();
        assert_eq!((&held[0].0, &held[1].0), (&held[2].0, &held[3].0), "{optimizer}");
        assert!(held[2].0.iter().flatten().any(|&bits| bits != 0));
        let (rank, reason, errors) = resume(|rank| rank.0 == 1).unwrap_err();
        assert_eq!(rank, Rank(1), "{reason}");
        assert_eq!(errors[3], format!("rank 1 failed: {reason}"));
    }
}

/// Rewrites the header of a safetensors file, with every name replaced.
fn rename(from: &Path, to: &Path, name: impl Fn(&str) -> String) {
    let mut bytes = fs::read(from).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let renamed: serde_json::Map<_, _> = header.into_iter().map(|(old, entry)| (name(&old), entry)).collect();
    let header = serde_json::to_vec(&renamed).unwrap();
    bytes.splice(8..8 + len, header.iter().copied());
    bytes[..8].copy_from_slice(&(header.len() as u64).to_le_bytes());
    fs::write(to, bytes).unwrap();
}

/// All initial values of a model, by its checks and its pieces.
fn loaded(model: &HfModel, weights: &Path) -> Result<Vec<Vec<f64>>, TrainError> {
    let spec = &model.description().spec;
    let init = InitSource::Pretrained(Arc::new(ModelWeights::open(weights)?));
    init.check(spec)?;
    let read = |(index, param): (usize, &ParamSpec)| {
        let mut values = vec![0.0; param.len()];
        let row_len = param.shape.iter().skip(1).product();
        let piece = Piece { param: ParamId(index), offset: 0, param_offset: 0, len: values.len(), row_len };
        init.fill(spec, &piece, &mut values)?;
        Ok(values)
    };
    spec.params.iter().enumerate().map(read).collect()
}

/// `LlamaModel.save_pretrained` and its relatives name `layers.0..`, where a parameter is `model.layers.0..`.
#[test]
fn every_family_loads_files_of_its_base_class() {
    for family in FAMILIES {
        let folder = golden().join(format!("../families/{}-padding", family.model_type));
        let text = fs::read_to_string(folder.join("config.json")).unwrap();
        let renamed = text.replace(family.class, family.base_class);
        assert_ne!(text, renamed, "{}", family.model_type);
        let config = HfConfig::parse(&renamed).unwrap();
        let exported = config.export(fsdp_core::DType::F32);
        assert!(exported.contains(family.class) && !exported.contains(family.base_class), "{exported}");
        let (model, dir) = (config.build().unwrap(), tempfile::tempdir().unwrap());
        let (full, base) = (folder.join("model.safetensors"), dir.path().join("base.safetensors"));
        let short = |name: &str| name.strip_prefix(family.base_prefix).unwrap_or(name).to_owned();
        rename(&full, &base, short);
        fs::write(dir.path().join("config.json"), renamed).unwrap();
        assert_eq!(loaded(&model, &base).unwrap(), loaded(&model, &full).unwrap(), "{}", family.model_type);
    }
}

#[test]
fn head_of_gpt_neox_loads_under_its_name_in_memory() {
    for case in ["gpt_neox", "gpt_neox-padding"] {
        let folder = golden().join("../families").join(case);
        let text = fs::read_to_string(folder.join("config.json")).unwrap();
        let (model, dir) = (HfConfig::parse(&text).unwrap().build().unwrap(), tempfile::tempdir().unwrap());
        let (full, other) = (folder.join("model.safetensors"), dir.path().join("model.safetensors"));
        rename(&full, &other, |name| name.replace("embed_out.weight", "lm_head.weight"));
        assert_ne!(fs::read(&full).unwrap(), fs::read(&other).unwrap());
        assert_eq!(loaded(&model, &other).unwrap(), loaded(&model, &full).unwrap(), "{case}");
    }
}

#[test]
fn untied_files_without_head_are_rejected_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(golden().join("config.json")).unwrap();
    let model = HfConfig::parse(&text).unwrap().build().unwrap();
    let path = dir.path().join("headless.safetensors");
    rename(&golden().join("model.safetensors"), &path, |name| {
        name.replace("lm_head.weight", "rotary_emb.inv_freq")
    });
    let error = loaded(&model, &path).unwrap_err();
    assert!(error.to_string().contains("has no output head (`lm_head.weight`)"), "{error}");
}

/// gpt-oss is published with experts in MXFP4, which are read as floats; an export has no blocks.
#[test]
fn experts_in_mxfp4_train_and_are_exported_as_floats() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/fsdp-ckpt/tests/fixtures/mxfp4");
    let text = fs::read_to_string(folder.join("config.json")).unwrap();
    let config = HfConfig::parse(&text).unwrap();
    assert!(!config.export(fsdp_core::DType::Bf16).contains("quantization_config"));
    let model = config.build().unwrap();
    let values = loaded(&model, &folder).unwrap();
    let experts = model.description().spec.params.iter().zip(&values);
    let experts = experts.filter(|(param, _)| param.fqn.ends_with("gate_up_proj"));
    let sums: Vec<f64> = experts.map(|(_, values)| values.iter().map(|value| value.abs()).sum()).collect();
    assert!(sums.len() == 3 && sums.iter().all(|sum| *sum > 0.0), "{sums:?}");
    let other = text.replace("mxfp4", "fp8");
    let error = HfConfig::parse(&other).unwrap_err().to_string();
    assert!(error.contains("quantization_config") && error.contains("mxfp4"), "{error}");
}

/// DeepSeek V3 and GLM 4.5 are published with a layer more, which predicts the token after the next.
#[test]
fn layers_that_predict_further_tokens_are_left_out() {
    let folder = golden().join("../families/deepseek_v3");
    let text = fs::read_to_string(folder.join("config.json")).unwrap();
    let model = HfConfig::parse(&text.replace("\"deepseek_v3\"", "\"kimi_k2\"")).unwrap().build().unwrap();
    let full = ModelReader::open(folder.join("model.safetensors")).unwrap();
    let further = |names: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        let spec = |name: &str| {
            let entry = full.entry(name).unwrap();
            TensorSpec { name: name.to_owned(), dtype: entry.dtype(), shape: entry.shape().to_vec() }
        };
        let mut tensors: Vec<TensorSpec> = full.names().map(spec).collect();
        for name in names {
            let name = format!("model.layers.2.{name}");
            tensors.push(TensorSpec { name, dtype: TensorType::F32, shape: vec![2, 2] });
        }
        let path = dir.path().join("model.safetensors");
        let plan = ExportPlan::new(&path, tensors, [].into()).unwrap();
        let (export, mut writer) = (plan.create().unwrap(), plan.writer());
        for entry in plan.files()[0].header().entries() {
            let mut bytes = vec![0; entry.len_bytes() as usize];
            if full.entry(entry.name()).is_ok() {
                full.read_rows(entry.name(), 0..entry.row_count(), &mut bytes).unwrap();
            }
            writer.write_rows(entry.name(), 0, &bytes).unwrap();
        }
        export.commit([writer.finish().unwrap()]).unwrap();
        loaded(&model, &path)
    };
    let expected = loaded(&model, &folder.join("model.safetensors")).unwrap();
    assert_eq!(further(&["eh_proj.weight", "mlp.gate.weight", "shared_head.norm.weight"]).unwrap(), expected);
    // A layer like all others is not left out.
    let error = further(&["mlp.gate.weight"]).unwrap_err().to_string();
    assert!(error.contains("1 not expected: `model.layers.2.mlp.gate.weight`"), "{error}");
}

/// Qwen 3 Next is published with a module that predicts the token after the next.
#[test]
fn module_that_predicts_further_tokens_is_left_out() {
    let folder = golden().join("../families/qwen3_next-padding");
    let text = fs::read_to_string(folder.join("config.json")).unwrap();
    let (model, dir) = (HfConfig::parse(&text).unwrap().build().unwrap(), tempfile::tempdir().unwrap());
    let (full, more) = (folder.join("model.safetensors"), dir.path().join("model.safetensors"));
    let reader = ModelReader::open(&full).unwrap();
    let spec = |name: &str| {
        let entry = reader.entry(name).unwrap();
        TensorSpec { name: name.to_owned(), dtype: entry.dtype(), shape: entry.shape().to_vec() }
    };
    let mut tensors: Vec<TensorSpec> = reader.names().map(spec).collect();
    tensors.push(TensorSpec { name: "mtp.fc.weight".to_owned(), dtype: TensorType::F32, shape: vec![2, 2] });
    let plan = ExportPlan::new(&more, tensors, [].into()).unwrap();
    let (export, mut writer) = (plan.create().unwrap(), plan.writer());
    for entry in plan.files()[0].header().entries() {
        let mut bytes = vec![0; entry.len_bytes() as usize];
        if reader.entry(entry.name()).is_ok() {
            reader.read_rows(entry.name(), 0..entry.row_count(), &mut bytes).unwrap();
        }
        writer.write_rows(entry.name(), 0, &bytes).unwrap();
    }
    export.commit([writer.finish().unwrap()]).unwrap();
    assert_eq!(loaded(&model, &more).unwrap(), loaded(&model, &full).unwrap());
}

/// Files of a whole model of text and images hold its text part under other names, and its vision tower.
#[test]
fn text_part_of_whole_model_loads() {
    for case in ["qwen3_5_text", "qwen3_5_moe_text"] {
        let folder = golden().join("../families").join(case);
        let text = fs::read_to_string(folder.join("config.json")).unwrap();
        let (model, dir) = (HfConfig::parse(&text).unwrap().build().unwrap(), tempfile::tempdir().unwrap());
        let (full, whole) = (folder.join("model.safetensors"), dir.path().join("model.safetensors"));
        rename(&full, &whole, |name| match name.strip_prefix("model.") {
            Some(rest) => format!("model.language_model.{rest}"),
            None => name.to_owned(),
        });
        assert_eq!(loaded(&model, &whole).unwrap(), loaded(&model, &full).unwrap(), "{case}");
    }
}

use std::fs;
use std::path::Path;

use fsdp_config::Resolved;
use tempfile::TempDir;

use super::*;

/// Writes files `a.jsonl`, `b.jsonl`, ... with these numbers of documents, each of which is one sample.
fn sources(documents: &[usize]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, &count) in ('a'..).zip(documents) {
        let line = |index: usize| format!("{{\"text\": \"{name}{}\"}}\n", char::from(b'A' + index as u8));
        fs::write(folder.path().join(format!("{name}.jsonl")), (0..count).map(line).collect::<String>())
            .unwrap();
    }
    folder
}

fn config(folder: &TempDir, data: &str) -> Resolved {
    let data = data.replace("DIR", folder.path().to_str().unwrap());
    let text = format!(
        "model.path = 'm'\nrun.out_dir = 'out'\n[train]\nsteps = 10\nmicro_batch_size = 2\nglobal_batch_size = 4\n\
         [data]\npacking = 'documents'\nseq_len = 1\nseed = 5\n{data}"
    );
    Resolved::parse(&text, "test", &[]).unwrap().config
}

fn load(config: &Resolved) -> Result<Training, DataError> {
    Training::load(&config.data, &config.train, &Loading::quietly(Path::new("out")), 256)
}

/// Returns the texts of all samples in the first `steps` steps.
fn texts(training: &Training, steps: u64) -> Vec<String> {
    let places = (0..steps).flat_map(|step| (0..training.micro_batches()).map(move |index| (step, index)));
    let samples = places.flat_map(|(step, index)| training.batch(step, index));
    samples
        .map(|sample| {
            let (inputs, targets) = sample.dataset.sample(sample.index.unwrap());
            [inputs[0], targets[0]].map(|id| char::from(id as u8)).iter().collect()
        })
        .collect()
}

const MIXED: &str =
    "[[data.source]]\npath = 'DIR/a.jsonl'\nweight = 3\n[[data.source]]\npath = ['DIR/b.jsonl']\n";

#[test]
fn single_source_matches_list_of_paths() {
    let folder = sources(&[9]);
    let [listed, source] = ["train = ['DIR/a.jsonl']", "[[data.source]]\npath = 'DIR/a.jsonl'"]
        .map(|data| load(&config(&folder, data)).unwrap());
    assert_eq!(texts(&listed, 7), texts(&source, 7));
    assert_eq!(listed.digest(), source.digest());
    let written = config(&folder, MIXED);
    assert_eq!(Resolved::parse(&written.to_toml(), "test", &[]).unwrap().config, written);
    assert_eq!((source.epoch(5), source.positions(5)), (listed.epoch(5), Vec::new()));
}

#[test]
fn mix_follows_weights_and_repeats_exhausted_sources() {
    let folder = sources(&[9, 2]);
    let training = load(&config(&folder, MIXED)).unwrap();
    let taken = texts(&training, 10);
    let of = |name: char| taken.iter().filter(|text| text.starts_with(name)).cloned().collect::<Vec<_>>();
    let (first, second) = (of('a'), of('b'));
    assert_eq!((first.len(), second.len()), (30, 10));
    for (taken, epoch) in [(first, 9), (second, 2)] {
        for epoch in taken.chunks_exact(epoch) {
            let distinct: std::collections::BTreeSet<&String> = epoch.iter().collect();
            assert_eq!(distinct.len(), epoch.len(), "{epoch:?}");
        }
    }
    let [first, second] = &*training.summary(10) else { panic!("two sources") };
    assert_eq!((first.share, first.samples, first.tokens), (0.75, 9, 18));
    assert_eq!((second.share, second.samples, second.epochs), (0.25, 2, 5.0));
    assert_eq!(training.positions(10)[1], SourcePosition { epoch: 5, taken: 0 });
    let numbers: Vec<usize> =
        (0..5).flat_map(|step| training.batch(step, 0)).map(|sample| sample.number).collect();
    assert!(numbers.iter().all(|&number| number < training.len()));
}

#[test]
fn digest_covers_source_weights_and_content() {
    let folder = sources(&[9, 2]);
    let digest = |data: &str| load(&config(&folder, data)).unwrap().digest();
    let mixed = digest(MIXED);
    assert_eq!(mixed, digest(&MIXED.replace("weight = 3", "weight = 3.0")));
    assert_ne!(mixed, digest(&MIXED.replace("weight = 3", "weight = 2")));
    assert_ne!(mixed, digest(&MIXED.replace("b.jsonl", "a.jsonl")));
}

#[test]
fn source_without_samples_or_share_is_rejected() {
    let folder = sources(&[9, 0]);
    let fault = |data: &str| load(&config(&folder, data)).unwrap_err().to_string();
    assert!(fault(MIXED).contains("data.source[1] holds no sample"), "{}", fault(MIXED));
    let folder = sources(&[9, 2]);
    let fault = load(&config(&folder, &MIXED.replace("weight = 3", "weight = 1e9"))).unwrap_err().to_string();
    assert!(fault.contains("data.source[1]") && fault.contains("weight"), "{fault}");
}

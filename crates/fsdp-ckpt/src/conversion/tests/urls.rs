//! Conversions from and to object stores.

use super::*;
use crate::file_io::Files;

/// The bytes of all files of an output, by name.
fn contents(path: &Path) -> Vec<(String, Vec<u8>)> {
    let files = Files::anywhere();
    if !files.is_directory(path) {
        return vec![(String::new(), files.read_whole(path).unwrap())];
    }
    let names = files.list(path).unwrap();
    names.into_iter().map(|name| (name.clone(), files.read_whole(&path.join(&name)).unwrap())).collect()
}

#[test]
fn store_output_matches_disk_output() {
    let outputs = [
        (Target::Torch, "out"),
        (Target::Dcp, "out"),
        (Target::Native, "out"),
        (Target::Safetensors, "out"),
        (Target::Safetensors, "out.safetensors"),
    ];
    for name in ["full.pth", "dcp_2rank_zstd", "hf_dcp_shards"] {
        let source = formats::open(fixture(name)).unwrap();
        for (target, out) in outputs {
            let dir = tempfile::tempdir().unwrap();
            let conversion = Conversion { world_size: NonZero::new(3).unwrap(), ..Conversion::new(target) };
            let conversion = Conversion { shard_bytes_max: 1000, ..conversion };
            let disk = dir.path().join(out);
            let on_disk = converted(&source, &disk, &conversion).unwrap();
            let folder = format!("file://{}/store/{out}", dir.path().display());
            for url in [format!("memory://convert/{name}/{target:?}/{out}"), folder].map(PathBuf::from) {
                let in_store = converted(&source, &url, &conversion).unwrap();
                assert_eq!(ConversionReport { elapsed: on_disk.elapsed, ..in_store }, on_disk);
                assert_eq!(contents(&url), contents(&disk), "{name} to {target:?}");
                // And back from the store.
                let opened = formats::open(&url).unwrap();
                assert!(is_same(&opened, &formats::open(&disk).unwrap()));
                let (all, back) = (Conversion::new(Target::Native), tempfile::tempdir().unwrap());
                let back = back.path().join("back");
                converted(&opened, &back, &Conversion { part: Part::All, ..all }).unwrap();
                assert!(is_same(&opened, &formats::open(&back).unwrap()));
                let cancel = AtomicBool::new(false);
                let found = crate::verify::verify(&opened, &Options::new(&NoProgress, &cancel)).unwrap();
                assert!(found.is_sound(), "{:?}", found.problems);
            }
        }
    }
}

#[test]
fn existing_destination_is_rejected_unless_replaced() {
    let source = formats::open(fixture("full.pth")).unwrap();
    let url = Path::new("memory://refused/out/model.safetensors");
    let plain = Conversion::new(Target::Safetensors);
    converted(&source, url, &plain).unwrap();
    let error = converted(&source, url, &plain).unwrap_err().to_string();
    assert!(error.contains("memory://refused/out/model.safetensors: it exists already"), "{error}");
    let directory = converted(&source, Path::new("memory://refused/out"), &Conversion::new(Target::Dcp));
    assert!(directory.unwrap_err().to_string().contains("exists already"));
    let inside = converted(&formats::open(url.parent().unwrap()).unwrap(), &url.with_file_name("in"), &plain);
    assert!(inside.unwrap_err().to_string().contains("which is to be converted"));
    let before = contents(url);
    let bf16 = Conversion { dtype: Some(TensorType::Bf16), replaces: true, ..plain };
    converted(&source, url, &bf16).unwrap();
    assert_ne!(contents(url), before);
    // A failed replacement leaves the existing file unchanged.
    let before = contents(url);
    let (canceled, options) = (AtomicBool::new(true), &NoProgress);
    convert(&source, url, &bf16, &Options::new(options, &canceled)).unwrap_err();
    assert_eq!(contents(url), before);
}

#[test]
fn canceled_conversion_leaves_store_empty() {
    let source = formats::open(fixture("dcp_2rank")).unwrap();
    let url = Path::new("memory://canceled/out");
    let canceled = AtomicBool::new(true);
    let native = Conversion::new(Target::Native);
    convert(&source, url, &native, &Options::new(&NoProgress, &canceled)).unwrap_err();
    assert!(Files::anywhere().list(url).unwrap().is_empty());
    converted(&source, url, &native).unwrap();
}

#[test]
fn unknown_url_scheme_error_lists_supported_ones() {
    let error = formats::open("s4://bucket/a").unwrap_err().to_string();
    assert!(error.contains("s4://bucket/a") && error.contains("there are s3, gs, az"), "{error}");
    let error = formats::open("memory://empty/a").unwrap_err();
    assert!(
        matches!(&error, Error::Io { cause, .. } if cause.kind() == std::io::ErrorKind::NotFound),
        "{error}"
    );
}

#[test]
fn folders_of_orbax_are_read_from_a_store() {
    for name in ["items/1", "files_zarr3", "zeros"] {
        let path = fixture("orbax").join(name);
        let on_disk = formats::open(&path).unwrap();
        let in_store = formats::open(format!("file://{}", path.display())).unwrap();
        assert!(is_same(&in_store, &on_disk), "{name}");
        let cancel = AtomicBool::new(false);
        let found = crate::verify::verify_all(&in_store, &Options::new(&NoProgress, &cancel)).unwrap();
        assert!(found.is_sound(), "{:?}", found.problems);
    }
    let parent = format!("file://{}", fixture("orbax/uncommitted/2.orbax-checkpoint-tmp").display());
    let error = formats::open(parent).unwrap_err().to_string();
    assert!(error.contains("not committed"), "{error}");
}

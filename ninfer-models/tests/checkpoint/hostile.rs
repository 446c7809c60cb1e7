//! Damaged and hostile files.

use std::path::Path;

use ninfer_models::checkpoint::{Checkpoint, HeaderFault};
use ninfer_models::{Config, Error, WeightTable};
use serde_json::json;
use tempfile::TempDir;

use crate::store::{Store, Tensor, file, raw_file};

fn dir_with(bytes: &[u8]) -> TempDir {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    dir
}

fn fault(bytes: &[u8]) -> HeaderFault {
    let dir = dir_with(bytes);
    match Checkpoint::open(dir.path()).unwrap_err() {
        Error::Header { file, fault } => {
            assert_eq!(file, dir.path().join("model.safetensors"));
            fault
        }
        other => panic!("{other}"),
    }
}

fn good() -> Vec<u8> {
    let tensors = [("a".to_owned(), Tensor::f32(&[2], &[1.0, 2.0])), ("b".to_owned(), Tensor::f32(&[], &[3.0]))];
    file(tensors.iter().map(|(n, t)| (n, t)), 0)
}

#[test]
fn damaged_headers_are_told_apart() {
    assert!(Checkpoint::open(dir_with(&good()).path()).is_ok());
    assert!(matches!(fault(&[]), HeaderFault::TooShort { len: 0 }));
    assert!(matches!(fault(&[1, 2, 3]), HeaderFault::TooShort { len: 3 }));
    assert!(matches!(fault(&[0xFF; 64]), HeaderFault::Length { claimed: u64::MAX, limit: 56 }));
    let mut long = good();
    long[..8].copy_from_slice(&1_000_000_000u64.to_le_bytes());
    assert!(matches!(fault(&long), HeaderFault::Length { claimed: 1_000_000_000, .. }));
    assert!(matches!(fault(&raw_file("not json", &[])), HeaderFault::Json { .. }));
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
    assert!(matches!(fault(pointer), HeaderFault::Length { .. }));

    let whole = good();
    for cut in 1..=12 {
        let expected = HeaderFault::Truncated { expected: 12, got: 12 - cut as u64 };
        assert_eq!(fault(&whole[..whole.len() - cut]), expected);
    }
    assert_eq!(fault(&[whole.as_slice(), &[0]].concat()), HeaderFault::Trailing { expected: 12, got: 13 });

    let two = |first: (u64, u64), second: (u64, u64)| {
        let t = |(start, end): (u64, u64)| json!({"dtype": "F32", "shape": [2], "data_offsets": [start, end]});
        fault(&raw_file(&json!({"a": t(first), "b": t(second)}).to_string(), &[0; 16]))
    };
    assert!(matches!(two((0, 8), (4, 12)), HeaderFault::Overlap { tensor, .. } if tensor == "b"));
    assert!(matches!(two((0, 8), (9, 17)), HeaderFault::Gap { tensor, from: 8, to: 9 } if tensor == "b"));
    assert!(matches!(two((0, 8), (8, 15)), HeaderFault::Size { tensor, expected: 8, got: 7, .. } if tensor == "b"));
    assert!(matches!(two((0, 8), (16, 8)), HeaderFault::Range { tensor, .. } if tensor == "b"));
    let near_end = u64::MAX - 7;
    assert!(matches!(two((0, 8), (near_end, u64::MAX)), HeaderFault::Size { .. } | HeaderFault::Gap { .. }));
}

#[test]
fn empty_tensors_and_empty_files_are_legal() {
    let tensors = [("a".to_owned(), Tensor::f32(&[0, 4], &[])), ("b".to_owned(), Tensor::f32(&[1], &[3.0]))];
    let dir = dir_with(&file(tensors.iter().map(|(n, t)| (n, t)), 0));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(checkpoint.read(checkpoint.get("a").unwrap()).unwrap().is_empty());
    assert_eq!(checkpoint.read(checkpoint.get("b").unwrap()).unwrap(), 3f32.to_le_bytes());
    let part = checkpoint.read_range(checkpoint.get("b").unwrap(), 2..100, &mut |_| {}).unwrap();
    assert_eq!(part, 3f32.to_le_bytes()[2..]);
    assert!(Checkpoint::open(dir_with(&raw_file("{}", &[])).path()).unwrap().tensors().is_empty());
}

#[test]
fn a_file_that_shrinks_after_opening_is_an_error() {
    let dir = dir_with(&good());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let path = dir.path().join("model.safetensors");
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(good().len() as u64 - 2).unwrap();
    assert!(checkpoint.read(checkpoint.get("a").unwrap()).is_ok());
    let error = checkpoint.read(checkpoint.get("b").unwrap()).unwrap_err();
    assert!(matches!(error, Error::Io { kind: std::io::ErrorKind::UnexpectedEof, .. }), "{error}");
}

#[test]
fn folders_that_hold_no_checkpoint_are_refused() {
    let dir = TempDir::new().unwrap();
    assert!(matches!(Checkpoint::open(dir.path()), Err(Error::NoCheckpoint { .. })));
    assert!(matches!(WeightTable::open(dir.path()), Err(Error::Io { .. })));
    std::fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    assert!(matches!(Checkpoint::open(dir.path()), Err(Error::Io { .. })));
    std::fs::create_dir(dir.path().join("config.json")).unwrap();
    assert!(matches!(Config::from_dir(dir.path()), Err(Error::Io { .. })));
}

#[test]
fn an_oversized_config_is_not_read() {
    let dir = TempDir::new().unwrap();
    let file = std::fs::File::create(dir.path().join("config.json")).unwrap();
    file.set_len(1 << 40).unwrap();
    assert!(matches!(Config::from_dir(dir.path()), Err(Error::FileTooLarge { got, .. }) if got == 1 << 40));
    std::fs::write(dir.path().join("config.json"), [0xFF, 0xFE]).unwrap();
    assert!(matches!(Config::from_dir(dir.path()), Err(Error::Json { .. })));
}

/// Two shards: a in one, b in two.
fn sharded() -> TempDir {
    let dir = TempDir::new().unwrap();
    let store = Store {
        config: json!({}),
        tensors: ["a", "b"].map(|n| (n.to_owned(), Tensor::f32(&[1], &[1.0]))).into_iter().collect(),
    };
    store.write_sharded(dir.path(), |n| if n == "a" { "one".to_owned() } else { "two".to_owned() });
    dir
}

fn write_index(dir: &Path, map: &serde_json::Value) {
    std::fs::write(dir.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
}

fn open(dir: &TempDir) -> Error {
    Checkpoint::open(dir.path()).unwrap_err()
}

#[test]
fn index_and_shards_must_agree() {
    let dir = sharded();
    assert_eq!(Checkpoint::open(dir.path()).unwrap().tensors().len(), 2);

    write_index(dir.path(), &json!({"a": "one", "b": "two", "c": "two"}));
    let error = open(&dir);
    let Error::IndexMismatch { file, missing, unlisted } = error else { panic!("{error}") };
    assert_eq!((file, missing.names(), unlisted.len()), (dir.path().join("two"), &["c".to_owned()][..], 0));

    write_index(dir.path(), &json!({"a": "one"}));
    assert_eq!(Checkpoint::open(dir.path()).unwrap().tensors().len(), 1); // nothing names the other file

    write_index(dir.path(), &json!({"a": "two"}));
    let error = open(&dir);
    let Error::IndexMismatch { missing, unlisted, .. } = error else { panic!("{error}") };
    assert_eq!((missing.names(), unlisted.names()), (&["a".to_owned()][..], &["b".to_owned()][..]));

    write_index(dir.path(), &json!({"a": "one", "b": "three"}));
    let error = open(&dir);
    assert!(matches!(&error, Error::MissingShard { file, tensor } if file.ends_with("three") && tensor == "b"));

    std::fs::copy(dir.path().join("one"), dir.path().join("three")).unwrap();
    let error = open(&dir);
    assert!(matches!(error, Error::DuplicateTensor { tensor, .. } if tensor == "a"));

    std::fs::write(dir.path().join("two"), b"").unwrap();
    write_index(dir.path(), &json!({"a": "one", "b": "two"}));
    let error = open(&dir);
    assert!(matches!(error, Error::Header { fault: HeaderFault::TooShort { .. }, file } if file.ends_with("two")));

    std::fs::write(dir.path().join("model.safetensors.index.json"), "{").unwrap();
    assert!(matches!(open(&dir), Error::Json { .. }));
}

#[test]
fn index_entries_stay_in_the_folder() {
    let dir = sharded();
    let inner = dir.path().join("inner");
    std::fs::create_dir(&inner).unwrap();
    let absolute = dir.path().join("one").display().to_string();
    for entry in ["../one", absolute.as_str(), "./../one", "inner/../../one", "", "..", "sub/one"] {
        write_index(&inner, &json!({"a": entry}));
        let error = Checkpoint::open(&inner).unwrap_err();
        assert!(matches!(&error, Error::UnsafePath { tensor, .. } if tensor == "a"), "{entry}: {error}");
    }
    write_index(dir.path(), &json!({"a": "inner"}));
    assert!(matches!(open(&dir), Error::Io { .. })); // a folder
}

#[cfg(unix)]
#[test]
fn links_may_not_leave_the_folder_but_in_a_download_cache() {
    use std::os::unix::fs::symlink;

    let dir = sharded();
    let inner = dir.path().join("inner");
    std::fs::create_dir(&inner).unwrap();
    write_index(&inner, &json!({"a": "shard"}));
    let shard = inner.join("shard");
    symlink("../one", &shard).unwrap();
    assert!(matches!(Checkpoint::open(&inner), Err(Error::UnsafePath { .. })));
    // A link to a link that leaves.
    std::fs::rename(&shard, inner.join("hop")).unwrap();
    symlink("hop", &shard).unwrap();
    assert!(matches!(Checkpoint::open(&inner), Err(Error::UnsafePath { .. })));
    std::fs::remove_file(&shard).unwrap();
    symlink("nowhere", &shard).unwrap();
    assert!(matches!(Checkpoint::open(&inner), Err(Error::MissingShard { .. })));
    std::fs::remove_file(&shard).unwrap();
    std::fs::copy(dir.path().join("one"), inner.join("real")).unwrap();
    symlink("real", &shard).unwrap();
    assert!(Checkpoint::open(&inner).is_ok());

    let (snapshot, blobs) = (dir.path().join("cache/snapshots/0123"), dir.path().join("cache/blobs"));
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir(&blobs).unwrap();
    std::fs::copy(dir.path().join("one"), blobs.join("abcd")).unwrap();
    symlink("../../blobs/abcd", snapshot.join("shard")).unwrap();
    symlink("../../../one", snapshot.join("other")).unwrap();
    write_index(&snapshot, &json!({"a": "shard"}));
    assert!(Checkpoint::open(&snapshot).is_ok());
    write_index(&snapshot, &json!({"a": "other"}));
    assert!(matches!(Checkpoint::open(&snapshot), Err(Error::UnsafePath { .. })));
}

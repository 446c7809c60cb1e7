//! Damaged containers: a typed error or a usable file, never a panic.

use std::path::Path;
use std::sync::LazyLock;

use ninfer_models::container::{Container, DirectoryFault};
use ninfer_models::weights::LayerRef;
use ninfer_models::{Config, Error, WeightTable};
use ninfer_quant::container::ContainerFormat;
use ninfer_quant::{Recipe, TensorRole};
use proptest::prelude::*;

use crate::file::{Fusion, Objects, convert, fixture};

const BF16: ContainerFormat = ContainerFormat::Bf16;

/// A container of a whole model, and where its payload starts.
static WHOLE: LazyLock<(Vec<u8>, usize)> =
    LazyLock::new(|| convert("tiny-tied", Fusion::Pairs, &|_| BF16).file(2, "tiny"));

fn fault(path: &Path, bytes: &[u8]) -> DirectoryFault {
    std::fs::write(path, bytes).unwrap();
    match Container::open(path).unwrap_err() {
        Error::Container { file, fault } => {
            assert_eq!(file, path);
            fault
        }
        other => panic!("{other}"),
    }
}

fn small() -> Objects {
    let mut objects = Objects::default();
    objects.resource("frontend/tokenizer.json", b"{}");
    objects.tensor("a", BF16, &[2, 3], vec![1; 12]);
    objects.tensor("b", ContainerFormat::F32, &[], vec![0; 4]);
    objects
}

#[test]
fn damaged_files_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.ninfer");
    let (good, start) = small().file(2, "m");
    std::fs::write(&path, &good).unwrap();
    let container = Container::open(&path).unwrap();
    assert_eq!(container.resource("frontend/tokenizer.json", 100).unwrap().as_deref(), Some(&b"{}"[..]));
    assert_eq!(container.resource("frontend/x", 100).unwrap(), None);
    assert_eq!(container.resource("a", 100).unwrap(), None);
    assert!(matches!(container.resource("frontend/tokenizer.json", 1), Err(Error::FileTooLarge { got: 2, .. })));

    assert_eq!(fault(&path, &[]), DirectoryFault::Magic);
    assert_eq!(fault(&path, &good[..15]), DirectoryFault::Magic);
    assert_eq!(fault(&path, b"version https://git-lfs.github.com/spec/v1"), DirectoryFault::Magic);
    let mut third = good.clone();
    third[7] = 3;
    assert_eq!(fault(&path, &third), DirectoryFault::Version { got: 3 });
    for cut in start..good.len() {
        assert!(matches!(fault(&path, &good[..cut]), DirectoryFault::Truncated { .. }), "{cut}");
    }
    for cut in [17, 100, 200] {
        assert!(matches!(fault(&path, &good[..cut]), DirectoryFault::Length { .. }), "{cut}");
    }
    let mut huge = good;
    huge[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(matches!(fault(&path, &huge), DirectoryFault::Length { claimed: u64::MAX, .. }));
    assert!(matches!(Container::open(dir.path().join("none.ninfer")), Err(Error::Io { .. })));
    assert!(matches!(Container::open(dir.path()), Err(Error::Io { .. })));
}

#[test]
fn a_file_that_shrinks_after_opening_is_an_error() {
    let (_dir, path) = convert("tiny-tied", Fusion::Pairs, &|_| BF16).write(2, "tiny-tied");
    let table = WeightTable::open(&path).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(8192).unwrap();
    let error = table.matrix(LayerRef::Mtp, TensorRole::MlpDown, &Recipe::Keep).unwrap_err();
    assert!(matches!(error, Error::Io { kind: std::io::ErrorKind::UnexpectedEof, .. }), "{error}");
}

#[test]
fn damaged_weights_are_refused_by_name() {
    let good = convert("tiny-tied", Fusion::Pairs, &|name| {
        if name.ends_with("mlp/down") { ContainerFormat::Fp8Row } else { BF16 }
    });
    let load = |name: &str, at: usize, bytes: &[u8], role| {
        let mut objects = good.clone();
        let index = objects.position(name);
        objects.list[index].1[at..at + bytes.len()].copy_from_slice(bytes);
        let (_dir, path) = objects.write(2, "tiny-tied");
        let error = WeightTable::open(path).unwrap().matrix(LayerRef::Main(0), role, &Recipe::Keep).unwrap_err();
        assert!(error.to_string().contains(name) && !error.help().is_empty(), "{error}");
    };
    // A NaN weight, a NaN code, a multiplier of 2 and a negative one.
    load("text/layers/0/mlp/gate_up", 6, &0x7FC0u16.to_le_bytes(), TensorRole::MlpGate);
    load("text/layers/0/mlp/down", 5, &[0x7F], TensorRole::MlpDown);
    let scales = 64 * 96;
    load("text/layers/0/mlp/down", scales, &0x4000u16.to_le_bytes(), TensorRole::MlpDown);
    load("text/layers/0/mlp/down", scales + 2, &0xBF00u16.to_le_bytes(), TensorRole::MlpDown);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn any_directory_byte_may_change(at: proptest::sample::Index, byte: u8, more: proptest::sample::Index) {
        // Each case changes a byte of the prefix and directory, and then one more.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.ninfer");
        let (mut file, start) = WHOLE.clone();
        let config = Config::from_dir(fixture("tiny-tied")).unwrap();
        for at in [at, more] {
            file[at.index(start)] = byte;
            std::fs::write(&path, &file).unwrap();
            if let Ok(table) = WeightTable::open_with(&path, config.clone()) {
                let _ = table.matrix(LayerRef::Root, TensorRole::Embedding, &Recipe::Keep);
            }
        }
    }
}

#[test]
fn every_directory_byte_of_a_small_container_may_change() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.ninfer");
    let (good, _) = small().file(2, "m");
    let end = 16 + u64::from_le_bytes(good[8..16].try_into().unwrap()) as usize;
    let mut opened = 0;
    for at in 0..end {
        for byte in [b'9', 0x80, good[at] ^ 1] {
            let mut file = good.clone();
            file[at] = byte;
            std::fs::write(&path, &file).unwrap();
            if let Ok(container) = Container::open(&path) {
                opened += 1;
                for o in container.objects() {
                    assert!(o.bytes() <= file.len() as u64);
                    let _ = container.resource(o.name(), 1 << 20);
                }
            }
        }
    }
    // Names and identities may be anything.
    assert!(opened > 20, "{opened}");
}

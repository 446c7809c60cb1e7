//! Logits of one prefill.

use ninfer_core::model::{CausalModel, LaneOptions, PrefillEnd};
use safetensors::SafeTensors;

use crate::reference::{fixture_path, session};

/// The reference in f32 is within 3.4e-5 of f64, and so may this be; logits reach 30, one rounding of which is 2e-6.
const TOLERANCE: f32 = 5e-4;

/// Logits of every position.
fn logits(ids: &[u32]) -> Vec<Vec<f32>> {
    let mut session = session(0);
    let vocab = session.limits().vocab;
    let mut lane = session.open_lane(&LaneOptions::new(ids.len())).unwrap();
    let mut rows = Vec::new();
    let mut sink = |first: usize, block: &[f32]| {
        assert_eq!(first, rows.len());
        rows.extend(block.chunks_exact(vocab).map(<[f32]>::to_vec));
        Ok(())
    };
    session.prefill(&mut lane, ids, PrefillEnd::More, Some(&mut sink)).unwrap();
    rows
}

#[test]
fn logits_are_the_reference() {
    let bytes = std::fs::read(fixture_path("logits.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let integers = |name: &str| -> Vec<i64> {
        file.tensor(name).unwrap().data().as_chunks::<8>().0.iter().map(|&b| i64::from_le_bytes(b)).collect()
    };
    for name in ["lifetimes", "heldout_96"] {
        let positions = integers(&format!("{name}.positions"));
        let ids: Vec<u32> =
            integers(&format!("{name}.input_ids")).into_iter().map(|id| u32::try_from(id).unwrap()).collect();
        let got = logits(&ids);
        let expected = file.tensor(&format!("{name}.logits")).unwrap();
        let [rows, vocab] = *expected.shape() else { panic!("a matrix is expected") };
        assert_eq!((rows, got.len()), (positions.len(), ids.len()));
        for (row, &position) in expected.data().chunks_exact(4 * vocab).zip(&positions) {
            let expected = row.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b));
            let got = &got[usize::try_from(position).unwrap()];
            let difference = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(difference < TOLERANCE, "{name}, position {position}: {difference:e}");
        }
    }
}

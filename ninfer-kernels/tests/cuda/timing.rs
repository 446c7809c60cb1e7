//! Times of recorded steps: the results are the same, and every kernel is there.

use ninfer_core::backend::Backend;
use ninfer_core::ops::{Norm, Project, RmsNorm};
use ninfer_core::segment::Profile;
use ninfer_core::{DType, WeightFormat};
use ninfer_kernels::cuda::{Cuda, Timing};

use super::lab::{Side, gpu};
use super::rng::Rng;
use super::stored::Stored;

/// A device of its own: others record at the same time.
fn side() -> Option<Side<Cuda>> {
    gpu()?;
    Some(Side::new(Cuda::new(0).unwrap()))
}

#[test]
fn timed_steps_give_the_same_bits_and_name_their_kernels() {
    let Some(mut side) = side() else { return };
    let mut rng = Rng::new(1);
    let stored = Stored::random(WeightFormat::Bf16, false, 256, 256, 0.1, &mut rng);
    let weight = side.backend.prepare(&[stored.packed()]).unwrap();
    let input = side.acts(3, 256, &(0..3 * 256).map(|i| (i % 7) as f32 - 3.0).collect::<Vec<_>>());
    let norm = Norm { gain: side.floats(1, 256, &[0.5; 256]), eps: 1e-6 };
    let batch = side.one(Profile::Step, 3, 0);
    let mut results = Vec::new();
    for timing in [Timing::Off, Timing::Replays, Timing::Kernels] {
        let (normed, output) = (side.result(3, 256), side.result(3, 256));
        assert_eq!(normed.dtype(), DType::Bf16);
        side.backend.set_timing(timing);
        let before = side.queue.launches();
        let step = side
            .backend
            .record(&mut side.queue, |r| {
                let (batch, input, norm) = (batch.clone(), input.clone(), norm.clone());
                r.rms_norm(RmsNorm { batch: batch.clone(), input, norm, output: normed.clone() })?;
                r.project(Project {
                    batch,
                    input: normed.clone(),
                    norm: None,
                    parts: vec![(weight.clone(), output.clone())],
                })
            })
            .unwrap();
        let launches = (side.queue.launches() - before) as usize;
        assert_eq!(step.nodes(), launches, "{timing:?}");
        for _ in 0..3 {
            side.backend.replay(&mut side.queue, &step).unwrap();
        }
        results.push(side.bytes(&output));
        side.backend.set_timing(Timing::Off);
        side.backend.replay(&mut side.queue, &step).unwrap();
        let times = side.backend.take_times().unwrap();
        assert_eq!(times.len(), if timing == Timing::Off { 0 } else { 3 }, "{timing:?}");
        for time in times {
            assert!(time.seconds > 0.0 && time.launches == launches, "{time:?}");
            let kernels = if timing == Timing::Kernels { launches } else { 0 };
            assert_eq!(time.kernels.len(), kernels);
            let report = side.backend.kernel_report();
            assert!(
                time.kernels.iter().all(|k| k.seconds >= 0.0 && report.iter().any(|r| r.name == k.name)),
                "{time:?}"
            );
            // Each time is a multiple of the device's clock.
            let sum: f64 = time.kernels.iter().map(|k| k.seconds).sum();
            assert!(sum <= time.seconds + 1e-6 * launches as f64, "{time:?}");
        }
        assert_eq!(side.backend.take_times().unwrap(), []);
    }
    assert!(results.iter().all(|r| *r == results[0]));
    side.check_guards();
}

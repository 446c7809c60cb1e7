//! Two owners of one buffer, and operations whose output overlaps something else they use.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ninfer_core::ops::{CopyRows, Norm, Project, ProjectAdd, RmsNorm};
use ninfer_core::segment::{Batch, Profile};
use ninfer_core::{Backend, DType, Error, View, WeightFormat};
use ninfer_kernels::cpu::Cpu;

use super::lab::{Lab, Mat};
use super::rng::Rng;
use super::stored::Stored;

fn project(
    batch: &Batch<Cpu>,
    input: &View<Cpu>,
    weight: &<Cpu as Backend>::Weight,
    output: &View<Cpu>,
) -> Project<Cpu> {
    let parts = vec![(weight.clone(), output.clone())];
    Project { batch: batch.clone(), input: input.clone(), norm: None, parts }
}

/// One thread projects into a buffer again and again while another one reads it: each of them either has the buffer to
/// itself or is told that it is busy, and a read never sees half a result.
#[test]
fn two_queues_on_one_buffer() {
    const ROWS: usize = 4;
    const N: usize = 512;
    let mut lab = Lab::cpu();
    let stored = Stored::random(WeightFormat::Bf16, false, N, 128, 0.1, &mut Rng::new(1));
    let weight = lab.weight(&[stored.packed()]);
    let inputs = [1.0f32, 2.0].map(|x| lab.input(ROWS, 128, &[x; ROWS * 128]));
    let output = lab.output::<f32>(ROWS, N);
    let batch = lab.one(Profile::Step, ROWS, 0);
    let results = inputs.each_ref().map(|input| {
        lab.run(|r| r.project(project(&batch, &input.view, &weight, &output.view)));
        lab.read::<f32>(&output)
    });
    let (backend, view) = (lab.backend.clone(), output.view.clone());
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut queue = backend.queue().unwrap();
            let (mut done, mut refused) = (0u64, 0u64);
            while !stop.load(Ordering::Relaxed) {
                let input = &inputs[(done % 2) as usize].view;
                match backend.run(&mut queue, |r| r.project(project(&batch, input, &weight, &view))) {
                    Ok(()) => done += 1,
                    Err(Error::BufferBusy) => refused += 1,
                    Err(other) => panic!("{other}"),
                }
            }
            (done, refused)
        });
        let mut queue = backend.queue().unwrap();
        let mut row = vec![0.0f32; N];
        let (mut reads, mut busy) = (0u64, 0u64);
        // Until both have met often enough; a writer that does nothing else holds the buffer most of the time.
        while (busy < 100 || reads < 100) && !writer.is_finished() {
            let part = view.row_range(0..1).unwrap();
            match backend.download(&mut queue, &part, bytemuck::cast_slice_mut(&mut row)) {
                Ok(()) => {
                    reads += 1;
                    assert!(results.iter().any(|r| r[..N] == row[..]), "half a result");
                }
                Err(Error::BufferBusy) => busy += 1,
                Err(other) => panic!("{other}"),
            }
            if reads >= 100 {
                // Leave it to the writer for longer.
                thread::yield_now();
            }
        }
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
    });
    // Nothing stays held.
    lab.run(|r| r.project(project(&batch, &inputs[0].view, &weight, &output.view)));
    assert_eq!(lab.read::<f32>(&output), results[0]);
}

#[track_caller]
fn aliased(error: Error, argument: &str) {
    assert!(matches!(&error, Error::Aliased { what, .. } if *what == argument), "{error}");
}

#[test]
fn outputs_overlap_nothing() {
    let mut lab = Lab::cpu();
    let mut rng = Rng::new(2);
    let stored = Stored::random(WeightFormat::F32, false, 8, 8, 0.1, &mut rng);
    let weight = lab.weight(&[stored.packed()]);
    let whole: Mat<Cpu> = lab.state(8, 8, &rng.values(64, 1.0));
    let rows = |from: usize| whole.view.row_range(from..from + 4).unwrap();
    let before = lab.read::<f32>(&whole);
    let batch = lab.one(Profile::Step, 4, 0);

    aliased(lab.fail(|r| r.project(project(&batch, &rows(0), &weight, &rows(0)))), "output");
    aliased(lab.fail(|r| r.project(project(&batch, &rows(0), &weight, &rows(3)))), "output");
    let twice = Project {
        parts: vec![(weight.clone(), rows(4)), (weight.clone(), rows(4))],
        ..project(&batch, &lab.input(4, 8, &[1.0f32; 32]).view, &weight, &rows(4))
    };
    aliased(lab.fail(|r| r.project(twice)), "output");
    let op = ProjectAdd { batch: batch.clone(), input: rows(2), weight: weight.clone(), residual: rows(4) };
    aliased(lab.fail(|r| r.project_add(op)), "residual");
    let gain = lab.input(1, 8, &[0.0f32; 8]);
    let norm = Norm { gain: gain.v(), eps: 1e-6 };
    let op = RmsNorm { batch: batch.clone(), input: rows(1), norm, output: rows(4) };
    aliased(lab.fail(|r| r.rms_norm(op)), "output");
    // A gain inside the output.
    let norm = Norm { gain: whole.view.row_range(5..6).unwrap(), eps: 1e-6 };
    let op = RmsNorm { batch: batch.clone(), input: rows(0), norm, output: rows(4) };
    aliased(lab.fail(|r| r.rms_norm(op)), "output");
    let index = lab.input(1, 1, &[0i32]);
    let op = CopyRows { src: rows(0), src_index: index.v(), dst: rows(3), dst_index: index.v() };
    aliased(lab.fail(|r| r.copy_rows(op)), "dst");
    // The segment table itself as an output.
    let bytes = lab.poisoned::<i32>(16, 8);
    let table = Batch::new(Profile::Step, 1, bytes.view.row_range(0..1).unwrap()).unwrap();
    lab.fill(&bytes, &[0i32; 128]);
    let output = View::new(bytes.view.buffer().clone(), DType::F32, bytes.view.offset(), 1, 8).unwrap();
    let op = project(&table, &lab.input(1, 8, &[1.0f32; 8]).view, &weight, &output);
    aliased(lab.fail(|r| r.project(op)), "output");

    // Refused before anything ran.
    assert_eq!(lab.read::<f32>(&whole), before);
    // Neighbours in one buffer are fine.
    lab.run(|r| r.project(project(&batch, &rows(0), &weight, &rows(4))));
}

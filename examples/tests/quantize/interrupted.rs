//! A run that does not come to its end leaves nothing that loads.

use ninfer_examples::Failure;
use ninfer_examples::quantize::Staging;
use ninfer_models::weights::WeightTable;

use crate::tiny::{fixture, job, partial, run};

/// Ends a conversion after `left` matrices and tensors.
fn stop_after(mut left: usize) -> impl FnMut(ninfer_examples::quantize::Step<'_>) -> ninfer_examples::Result<()> {
    move |_| {
        if left == 0 {
            return Err(Failure::usage("stopped", "go on"));
        }
        left -= 1;
        Ok(())
    }
}

#[test]
fn a_failed_run_removes_what_it_wrote() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job(&fixture("tiny-moe"), &folder, "nvfp4");
    job.shard_bytes = 50_000;
    let planned = job.plan().unwrap();
    for left in [0, 1, 20, planned.plan().steps() - 1] {
        let failure = planned.run(&mut stop_after(left)).unwrap_err();
        assert_eq!(failure.to_string(), "stopped");
        assert!(!job.output.exists() && !partial(&job).exists());
    }
    planned.run(&mut stop_after(planned.plan().steps())).unwrap();
    WeightTable::open(&job.output).unwrap();
}

#[test]
fn a_killed_run_leaves_nothing_that_loads() {
    for shard_bytes in [50_000, 1 << 30] {
        let folder = tempfile::tempdir().unwrap();
        let mut job = job(&fixture("tiny-moe"), &folder, "fp8");
        job.shard_bytes = shard_bytes;
        let planned = job.plan().unwrap();
        let steps = planned.plan().steps();
        for left in [0, 1, 20, steps / 2, steps - 1] {
            let staging = Staging::open(&job.model, &job.output, left > 0).unwrap();
            planned.write_to(staging.dir(), &mut stop_after(left)).unwrap_err();
            // What a signal does: nothing is cleaned up.
            std::mem::forget(staging);
            assert!(partial(&job).is_dir() && !job.output.exists());
            assert!(WeightTable::open(partial(&job)).is_err());
            // Not even with the configuration of the model.
            std::fs::copy(job.model.join("config.json"), partial(&job).join("config.json")).unwrap();
            assert!(WeightTable::open(partial(&job)).is_err());
        }
        let refused = run(&job).unwrap_err();
        assert!(matches!(&refused, Failure::Exists { path, .. } if *path == partial(&job)), "{refused}");
        job.force = true;
        run(&job).unwrap();
        assert!(!partial(&job).exists());
        WeightTable::open(&job.output).unwrap();
    }
}

#[test]
fn existing_outputs_are_kept_unless_they_may_be_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job(&fixture("tiny-tied"), &folder, "q4");
    run(&job).unwrap();
    let before = std::fs::read(job.output.join("model.safetensors")).unwrap();
    assert!(matches!(run(&job).unwrap_err(), Failure::Exists { .. }));
    assert_eq!(std::fs::read(job.output.join("model.safetensors")).unwrap(), before);

    job.recipes = "w8".parse().unwrap();
    job.force = true;
    run(&job).unwrap();
    assert_ne!(std::fs::read(job.output.join("model.safetensors")).unwrap(), before);
    let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["out"]);

    // Folders that are no models, or hold more than one, are not replaced.
    std::fs::create_dir(job.output.join("more")).unwrap();
    assert!(matches!(run(&job).unwrap_err(), Failure::Exists { .. }));
    job.output = folder.path().join("photos");
    std::fs::create_dir(&job.output).unwrap();
    std::fs::write(job.output.join("a.jpg"), "").unwrap();
    assert!(matches!(run(&job).unwrap_err(), Failure::Exists { .. }));
    job.output = job.model.clone();
    assert!(matches!(run(&job).unwrap_err(), Failure::Usage { .. }));
}

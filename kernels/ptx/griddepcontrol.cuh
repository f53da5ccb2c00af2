// Programmatic dependent launch (PTX ISA, "griddepcontrol"): a kernel that the host launches so may start before the ones
// before it in the stream have ended. It touches no memory of theirs before wait(), which returns once they have ended and
// what they wrote is visible. Before sm_90 a kernel starts after the others anyway.
#pragma once

static __device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel's blocks may take the room that this grid's leave, once all of this grid's have started.
static __device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

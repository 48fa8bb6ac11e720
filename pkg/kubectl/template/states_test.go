package template

const machine = `{apiVersion: gpu.tessera.dev/v1alpha1, kind: GPUInventory, metadata: {name: a}, status: {gpus: []}}`

package main

import (
	"fmt"
	"os"
	"regexp"
	"strings"
)

// A system is a program of others that uses the devices of Tessera.
type system struct {
	// name of the directory of sim/cluster that pins it, if it was built, and of its data here.
	name string
	// title and address for people.
	title, address string
	// module that it is built from.
	module string
	// test is the test with its story, whose parts are subtests; empty: none can be run.
	test  string
	parts []part
	// kubernetes is the minor version that it runs on; empty: the newest.
	kubernetes string
	// cannot names the uses that fail or can't be tried, with the reasons.
	cannot string
}

// A part of a story.
type part struct{ name, title string }

// systems returns all of them, as the table has them.
func systems() []system {
	return []system{
		{
			name: "kueue", title: "Kueue", address: "works-with.md#quota-with-kueue", module: "sigs.k8s.io/kueue", test: "TestKueue",
			parts: []part{
				{"quota", "whole GPUs, partitions and shares out of one quota of memory"},
				{"preemption", "a queue takes back GPUs that another of its cohort has borrowed for a job of lower priority"},
			},
			cannot: "claims with `firstAvailable`, `allocationMode: All`, admin access, constraints or configs: Kueue refuses them",
		},
		{
			name: "jobset", title: "JobSet", address: "https://jobset.sigs.k8s.io", module: "sigs.k8s.io/jobset", test: "TestJobSet",
			parts: []part{
				{"run", "each pod of a driver and its workers gets a GPU of its own"},
				{"restart", "a pod fails, and all start again with a GPU each"},
				{"delete", "the claims go with the JobSet, and one pod gets all GPUs"},
			},
		},
		{
			name: "lws", title: "LeaderWorkerSet", address: "https://lws.sigs.k8s.io", module: "sigs.k8s.io/lws", test: "TestLeaderWorkerSet",
			parts: []part{
				{"run", "leaders and workers of two groups get a GPU each"},
				{"restart", "a worker is deleted, and its group starts again with a GPU each"},
				{"scale", "one group less gives its GPUs back"},
				{"delete", "the claims go with the set, and one pod gets all GPUs"},
			},
		},
		{
			name: "kuberay", title: "KubeRay", address: "https://docs.ray.io/en/latest/cluster/kubernetes/index.html",
			module: "github.com/ray-project/kuberay/ray-operator", test: "TestKubeRay",
			parts: []part{
				{"run", "the head and three workers get a GPU each"},
				{"restart", "the workers are deleted, and come back with a GPU each"},
				{"scale", "workers that are taken away give their GPUs back"},
				{"delete", "the claims go with the cluster, and one pod gets all GPUs"},
			},
			cannot: "Ray itself wasn't run. It has to be told of `num-gpus` in `rayStartParams`, because it reads resources, not claims",
		},
		{
			name: "volcano", title: "Volcano", address: "https://volcano.sh", module: "volcano.sh/volcano", test: "TestVolcano", kubernetes: "1.34",
			parts: []part{
				{"run", "a gang of five gets a GPU each"},
				{"gang", "a second one waits as a whole while three GPUs are free, holds none, and runs when the first is gone"},
				{"delete", "the claims go with the jobs, and one pod gets all GPUs"},
			},
			cannot: "Kubernetes after 1.34 wasn't run; from 1.36 its scheduler needs `update` of `resourceclaims/binding`, which by its source the chart " +
				"doesn't give it. Claims are off by default: `predicate.DynamicResourceAllocationEnable`. Pods without requests for CPU or memory are best " +
				"effort whatever they claim, and run though the rest of their gang waits. Its admission webhooks were off",
		},
		{
			name: "kai", title: "KAI Scheduler", address: "https://github.com/NVIDIA/KAI-Scheduler", module: "github.com/NVIDIA/KAI-scheduler", test: "TestKAI",
			parts: []part{
				{"run", "a gang of five gets a GPU each"},
				{"gang", "a second one waits as a whole while three GPUs are free, holds none, and runs when the first is gone"},
				{"delete", "the claims go with the pods, and one pod gets all GPUs"},
			},
			cannot: "GPUs that can be divided on demand: by its source it never allocates devices that consume counters. Nor, by its source, does it " +
				"heed devices' taints, or allocate claims with `firstAvailable`. The run's SharingPolicy was therefore `exclusive`. From Kubernetes 1.36 its binder " +
				"needs `update` of `resourceclaims/binding`, which the chart doesn't give it ([role.yaml](../../test/consumers/testdata/kai/role.yaml)). " +
				"Hooks of its chart were off. Later versions weren't run: the module proxy in use doesn't give them out",
		},
		{
			name: "karpenter", title: "Karpenter, KWOK provider", address: "works-with.md", module: "sigs.k8s.io/karpenter",
			cannot: "Not built: 1.15 needs Go 1.26.9. By its source, no instance type of the provider in 1.14 has devices, so that claims can't ask for " +
				"the first node; and Karpenter leaves pods with claims alone unless `IGNORE_DRA_REQUESTS` is false",
		},
		{
			name: "cluster-autoscaler", title: "Cluster Autoscaler, KWOK provider", address: "works-with.md", module: "k8s.io/autoscaler/cluster-autoscaler",
			cannot: "Not built: the module proxy in use doesn't give it out",
		},
	}
}

// find returns the system of that name.
func find(name string) (system, error) {
	for _, s := range systems() {
		if s.name == name {
			return s, nil
		}
	}
	return system{}, fmt.Errorf("there is no system %q", name)
}

// partNames are the names of the parts, in order.
func (s system) partNames() []string {
	var names []string
	for _, p := range s.parts {
		names = append(names, p.name)
	}
	return names
}

// version is the version that sim/cluster pins; root is that of the checkout.
func (s system) version(root string) (string, error) {
	file := root + "/sim/cluster/" + s.name + "/go.mod"
	data, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	match := regexp.MustCompile(`(?m)^(?:require)?\s*` + regexp.QuoteMeta(s.module) + ` (v\S+)`).FindSubmatch(data)
	if match == nil {
		return "", fmt.Errorf("%s doesn't require %s", file, s.module)
	}
	return strings.TrimPrefix(string(match[1]), "v"), nil
}

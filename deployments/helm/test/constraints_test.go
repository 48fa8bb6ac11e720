package test

import (
	"cmp"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

// TestRestrictedV2 checks that OpenShift's SecurityContextConstraints restricted-v2, which every
// account may use, admit the pods of all accounts but those to which the chart grants
// others, and that it grants them only to accounts of pods that need them.
func TestRestrictedV2(t *testing.T) {
	want := map[string][]string{"tessera-controller": nil, "tessera-remove-node-labels": nil, "tessera-remove-node-taints": nil}
	got := map[string][]string{}
	for _, args := range [][]string{
		{"--set=controller.nodeLabels.enabled=true"},
		{"--values=testdata/simulator.values.yaml"},
		{"--values=testdata/everything.values.yaml", "--set=fullnameOverride=tessera"},
	} {
		out, all, err := templateWithHooks(t, append(args, "--kube-version=1.37.1")...)
		if err != nil {
			t.Fatalf("helm template: %v\n%s", err, all)
		}
		granted := mayUsePrivileged(t, out)
		for doc := range strings.SplitSeq(out, "\n---\n") {
			var object struct {
				Spec struct{ Template corev1.PodTemplateSpec }
			}
			if err := yaml.Unmarshal([]byte(doc), &object); err != nil {
				t.Fatal(err)
			}
			pod := object.Spec.Template.Spec
			if len(pod.Containers) == 0 {
				continue
			}
			if refused := refusals(pod); slices.Contains(granted, pod.ServiceAccountName) {
				if len(refused) == 0 {
					t.Errorf("%s may use constraints that it doesn't need", pod.ServiceAccountName)
				}
			} else {
				got[pod.ServiceAccountName] = append(got[pod.ServiceAccountName], refused...)
			}
		}
	}
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("what restricted-v2 refuses, by account (-want +got):\n%s", diff)
	}
}

// mayUsePrivileged returns the accounts that the chart lets use the constraints privileged.
func mayUsePrivileged(t *testing.T, rendered string) []string {
	t.Helper()
	var accounts []string
	for doc := range strings.SplitSeq(rendered, "\n---\n") {
		if !strings.Contains(doc, "\nkind: RoleBinding\n") {
			continue
		}
		var binding rbacv1.RoleBinding
		if err := yaml.UnmarshalStrict([]byte(doc), &binding); err != nil {
			t.Fatal(err)
		}
		for _, subject := range binding.Subjects {
			if strings.HasSuffix(binding.RoleRef.Name, "-privileged") {
				accounts = append(accounts, subject.Name)
			}
		}
	}
	return accounts
}

// refusals returns the parts of a pod that restricted-v2 doesn't admit. Its rules are those of
// OpenShift 4.11 and later (cluster-kube-apiserver-operator, bindata/bootkube/scc-manifests).
func refusals(pod corev1.PodSpec) []string {
	var refused []string
	refuse := func(is bool, what string) {
		if is {
			refused = append(refused, what)
		}
	}
	shared := ptr.Deref(pod.SecurityContext, corev1.PodSecurityContext{})
	refuse(pod.HostPID || pod.HostIPC || pod.HostNetwork, "a namespace of the host")
	refuse(shared.RunAsUser != nil, "a user ID that isn't of the namespace's range")
	refuse(shared.FSGroup != nil || shared.SupplementalGroups != nil, "a group that isn't of the namespace's range")
	refuse(shared.SELinuxOptions != nil, "SELinux options that aren't the namespace's")
	for _, v := range pod.Volumes {
		refuse(v.HostPath != nil, "the volume "+v.Name)
	}
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		own := ptr.Deref(c.SecurityContext, corev1.SecurityContext{})
		refuse(own.RunAsUser != nil, c.Name+": a user ID that isn't of the namespace's range")
		refuse(ptr.Deref(own.Privileged, false), c.Name+": privileged")
		refuse(ptr.Deref(own.AllowPrivilegeEscalation, false), c.Name+": allowPrivilegeEscalation")
		refuse(own.SELinuxOptions != nil, c.Name+": SELinux options that aren't the namespace's")
		for _, capability := range ptr.Deref(own.Capabilities, corev1.Capabilities{}).Add {
			refuse(capability != "NET_BIND_SERVICE", c.Name+": the capability "+string(capability))
		}
		for _, port := range c.Ports {
			refuse(port.HostPort != 0, c.Name+": a port of the host")
		}
		profile := cmp.Or(own.SeccompProfile, shared.SeccompProfile)
		refuse(profile != nil && profile.Type != corev1.SeccompProfileTypeRuntimeDefault, c.Name+": a seccomp profile")
	}
	return refused
}

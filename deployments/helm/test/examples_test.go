//go:build integration

package test

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// strictExamples checks that the pods of all examples, with the lines that
// docs/user/security.md adds, are admitted by the Pod Security Standard "restricted".
func strictExamples(t *testing.T, s *server) {
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: "strict", Labels: map[string]string{"pod-security.kubernetes.io/enforce": "restricted"},
	}}
	if err := s.admin.Create(t.Context(), namespace); err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(read(t, "../../../docs/user/security.md"), "\n## Strict pods\n")
	blocks := yamlBlocks(section)
	if !found || len(blocks) == 0 {
		t.Fatal("docs/user/security.md has no manifest of a strict pod")
	}
	lines := podsIn(t, "docs/user/security.md", blocks[0])
	if len(lines) != 1 {
		t.Fatalf("docs/user/security.md has %d strict pods", len(lines))
	}
	strict := lines[0].Spec
	pods := examples(t)
	if len(pods) < 25 {
		t.Fatalf("found only %d pods", len(pods))
	}
	for _, pod := range pods {
		plain := pod.DeepCopy()
		if err := s.admin.Create(t.Context(), plain, client.DryRunAll); err == nil || !strings.Contains(err.Error(), "violates PodSecurity") {
			t.Errorf("%s: docs/user/security.md says that examples leave lines out, but this one is admitted without them: %v", pod.Annotations["from"], err)
		}
		pod.Spec.SecurityContext = strict.SecurityContext
		for i := range pod.Spec.Containers {
			pod.Spec.Containers[i].SecurityContext = strict.Containers[0].SecurityContext
		}
		if err := s.admin.Create(t.Context(), &pod, client.DryRunAll); err != nil {
			t.Errorf("%s: with the lines of docs/user/security.md: %v", pod.Annotations["from"], err)
		}
	}
}

// examples returns the pods of the pages and of the demo. The annotation "from" is the file.
func examples(t *testing.T) []corev1.Pod {
	t.Helper()
	var pods []corev1.Pod
	for _, pattern := range []string{"README.md", "docs/user/*.md", "demo/*/*.yaml", "demo/*/*/*.yaml"} {
		files, err := filepath.Glob(filepath.Join("../../..", pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("no file matches %s: %v", pattern, err)
		}
		for _, file := range files {
			blocks := []string{read(t, file)}
			if filepath.Ext(file) == ".md" {
				blocks = yamlBlocks(blocks[0])
			}
			for _, block := range blocks {
				if strings.HasSuffix(file, "docs/user/security.md") {
					continue
				}
				pods = append(pods, podsIn(t, file, block)...)
			}
		}
	}
	return pods
}

// yamlBlocks returns a page's blocks of YAML, except those of other programs, which
// begin with "```yaml before".
func yamlBlocks(page string) []string {
	var blocks []string
	for _, m := range regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$").FindAllStringSubmatch(page, -1) {
		blocks = append(blocks, m[1])
	}
	return blocks
}

// podsIn returns the pods, and those of workloads, in YAML documents.
func podsIn(t *testing.T, file, text string) []corev1.Pod {
	t.Helper()
	var pods []corev1.Pod
	for document := range strings.SplitSeq(text, "\n---\n") {
		var object struct {
			Kind string
			Spec struct {
				corev1.PodSpec
				Template corev1.PodTemplateSpec
			}
		}
		if yaml.Unmarshal([]byte(document), &object) != nil {
			continue // another kind's spec
		}
		pod := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "strict", Name: "example", Annotations: map[string]string{"from": file}}}
		switch object.Kind {
		case "Pod":
			pod.Spec = object.Spec.PodSpec
		case "Deployment", "Job":
			pod.Spec = object.Spec.Template.Spec
		default:
			continue
		}
		pods = append(pods, pod)
	}
	return pods
}

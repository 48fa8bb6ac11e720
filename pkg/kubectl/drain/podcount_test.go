package drain

import "testing"

// TestPodCount counts pods, and names PodGroups of which no pod is known.
func TestPodCount(t *testing.T) {
	pod, group := eviction{Pod: "a/b"}, eviction{PodGroup: "a/gang"}
	for want, all := range map[string][]eviction{
		"0 pods": nil, "1 pod": {pod}, "the pods of PodGroup a/gang": {group}, "2 pods and the pods of PodGroup a/gang": {pod, group, pod},
	} {
		if got := podCount(all); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

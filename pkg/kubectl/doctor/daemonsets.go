package doctor

import (
	"context"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
)

// failedCreate is the reason of events about pods that can't be created.
const failedCreate = "FailedCreate"

// daemonSets are Tessera's own that lack pods, with the events that say why.
type daemonSets struct {
	lacking []appsv1.DaemonSet
	events  []corev1.Event
}

func readDaemonSets(ctx context.Context, r *cluster.Reader) (out daemonSets, err error) {
	all, err := r.Kube.AppsV1().DaemonSets("").List(ctx, metav1.ListOptions{LabelSelector: cluster.NameLabel})
	if err != nil {
		return out, r.TolerateUnread(err, cluster.DaemonSetsName)
	}
	for i := range all.Items {
		s := &all.Items[i]
		if lacking(s) <= 0 {
			continue
		}
		out.lacking = append(out.lacking, *s)
		events, err := r.Kube.CoreV1().Events(s.Namespace).List(ctx, metav1.ListOptions{FieldSelector: "reason=" + failedCreate})
		if err != nil {
			return out, r.TolerateUnread(err, cluster.EventsName)
		}
		out.events = append(out.events, events.Items...)
	}
	return out, nil
}

// lacking is how many pods of a DaemonSet don't exist.
func lacking(s *appsv1.DaemonSet) int32 {
	return s.Status.DesiredNumberScheduled - s.Status.CurrentNumberScheduled
}

// examine returns a finding for each DaemonSet whose pods the API server refuses. Others lack
// pods only for a moment.
func (d *daemonSets) examine() []finding {
	var out []finding
	for i := range d.lacking {
		s := &d.lacking[i]
		why := d.whyRefused(s)
		if why == "" {
			continue
		}
		do := fmt.Sprintf("kubectl describe daemonset %s -n %s", s.Name, s.Namespace)
		if strings.Contains(why, "violates PodSecurity") {
			do = fmt.Sprintf("kubectl label --overwrite namespace %s pod-security.kubernetes.io/enforce=privileged", s.Namespace)
		}
		out = append(out, finding{
			Level: trouble, Check: "pods-refused", Subject: "DaemonSet " + s.Namespace + "/" + s.Name,
			What: fmt.Sprintf("%d of %d pods can't be created: %s", lacking(s), s.Status.DesiredNumberScheduled, why), Do: do,
		})
	}
	return out
}

// whyRefused returns the message of the last event about a DaemonSet.
func (d *daemonSets) whyRefused(s *appsv1.DaemonSet) string {
	var last *corev1.Event
	for i := range d.events {
		e := &d.events[i]
		about := e.InvolvedObject
		if e.Reason == failedCreate && about.Kind == "DaemonSet" && about.Namespace == s.Namespace && about.Name == s.Name &&
			(last == nil || last.LastTimestamp.Before(&e.LastTimestamp)) {
			last = e
		}
	}
	if last == nil {
		return ""
	}
	return strings.TrimPrefix(last.Message, "Error creating: ")
}

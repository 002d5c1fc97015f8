#!/usr/bin/env bash
# Runs the sample's chat, in a plain activity, on Android 15's classes (Robolectric): asks, cancels, rotates, ends the process,
# draws. Wants Maven, a JDK 17 and Debian's package aapt; loads 600 MB the first time. check.sh PYTHON: one that has edge.
# Pictures: build/android.
set -euo pipefail
python=$(realpath -s "$1") here=$(cd "$(dirname "$0")" && pwd)
for program in mvn javac aapt2; do
  command -v $program > /dev/null || { echo "make test-android: there is no $program; skipped"; exit 0; }
done
sdk=15-robolectric-13954326 resources_sdk=14-robolectric-10818077 # Debian's aapt2 reads the resources of 14
kotlin=2.4.20 # as in pom.xml
repository=$HOME/.m2/repository
get() { mvn -q -B -Dstyle.color=never dependency:get -Dtransitive=false -Dartifact="$1"; }
cd "$here/../.."
rm -rf build/android && mkdir -p build/android
cd build/android
mkdir -p src jni aar sdks assets resources/com/android/tools
"$python" -m edge export ../../tests/golden/llama-gqa-tied.gguf -q --package kotlin --max-kv-size 128 \
  --prefill-step-size 16 --threads 2 -o kit
"$python" - <<'END'
from pathlib import Path

from edge.apps.archives import KOTLIN
from edge.apps.bindings import copy_source

app = KOTLIN / "project" / "app" / "src" / "main" / "kotlin" / "com" / "example" / "chat"
for path in [*KOTLIN.glob("src/edge/runtime/*.kt"), *(app / f"{name}.kt" for name in ("Chat", "Phone", "Turn"))]:
    copy_source(path, Path("src") / path.name)
END
cp "$here"/src/main/kotlin/*.kt src
cp kit/edge/src/main/resources/edge/runtime/libedge-*.so jni/libedge.so
cp kit/model.edge assets
get org.robolectric:android-all-instrumented:$sdk-i7
get org.robolectric:android-all:$resources_sdk
cp "$repository"/org/robolectric/android-all-instrumented/$sdk-i7/*.jar sdks
for artifact in androidx.test:monitor:1.8.0 androidx.test.espresso:espresso-idling-resource:3.7.0 \
  androidx.tracing:tracing:1.1.0; do # AARs, which Maven puts on no classpath
  IFS=: read -r group name version <<< "$artifact"
  get "$artifact:aar"
  unzip -qop "$repository/${group//.//}/$name/$version/$name-$version.aar" classes.jar > "aar/$name.jar"
done
get org.jetbrains.kotlin:kotlin-serialization-compiler-plugin-embeddable:$kotlin
cp "$repository"/org/jetbrains/kotlin/kotlin-serialization-compiler-plugin-embeddable/$kotlin/*$kotlin.jar aar/serialization.jar
cat > AndroidManifest.xml <<'END'
<manifest xmlns:android="http://schemas.android.com/apk/res/android" package="com.example.chat" android:versionCode="1">
  <uses-sdk android:minSdkVersion="26" android:targetSdkVersion="35"/>
  <application android:label="chat">
    <activity android:name="com.example.chat.ChatActivity" android:exported="true"/>
  </application>
</manifest>
END
aapt2 link --manifest AndroidManifest.xml -A assets -0 edge -o app.ap_ \
  -I "$repository/org/robolectric/android-all/$resources_sdk/android-all-$resources_sdk.jar"
cat > resources/com/android/tools/test_config.properties <<END
android_resource_apk=$PWD/app.ap_
android_merged_manifest=$PWD/AndroidManifest.xml
android_custom_package=com.example.chat
END
mvn -q -B -Dstyle.color=never -f "$here/pom.xml" test

#!/usr/bin/env bash
# Runs the sample's chat, in a plain activity, on Android 16's own classes (Robolectric): with target 35, then with target 36 and
# minified by R8, as Gradle makes a release. Both ask, cancel, rotate, trim, end the process and draw. Android 16 wants Java 21;
# without it, target 35 runs on Android 15. Maven loads 450 MB the first time. check.sh PYTHON: one that has edge. Pictures:
# build/android.
set -euo pipefail
python=$(realpath -s "$1") here=$(cd "$(dirname "$0")" && pwd)
root=$(realpath "$here/../..") framework=/usr/share/android-framework-res/framework-res.apk
compiler=$root/build/kotlin/node_modules/kotlin-compiler/lib
leave() { echo "make test-android: $1, so the sample did not run on Android's classes"; exit 0; }
for program in mvn javac aapt2 "$framework" "$compiler"; do
  command -v "$program" > /dev/null || [ -e "$program" ] || leave "there is no $program"
done
[ "$(uname -sm)" = "Linux x86_64" ] || leave "Robolectric draws on x86-64 alone"
newer=$(for java in /usr/lib/jvm/*/bin/java; do
  version=$("$java" -XshowSettings:properties -version 2>&1 | sed -n 's/.*java.specification.version = //p')
  if [ "${version%%.*}" -ge 21 ] && [ "${version%%.*}" -le 25 ] && [ -x "${java}c" ]; then echo "$version $java"; fi
done 2> /dev/null | sort -n | head -1 | cut -d' ' -f2-)
sdk=36 android=
[ -n "$newer" ] || sdk=35 android=-Dandroid=15-robolectric-13954326-i7
rm -rf "$root/build/android" && mkdir -p "$root/build/android" && cd "$root/build/android"

load() { # the paths of all jars, in the file classpath; what is in Maven's cache needs no network
  timeout 150 mvn -q -B -Dstyle.color=never -f "$here/pom.xml" $android "$@" \
    org.apache.maven.plugins:maven-dependency-plugin:3.8.1:build-classpath -Dmdep.outputFile="$PWD/classpath" > maven.log 2>&1
}
load -o || load -U || { sleep 5; load -U; } || { sleep 20; load -U; } || {
  leave "Maven did not load what pom.xml names in four trials ($(grep -m 1 -oE 'Could not (transfer|find).*' maven.log | cut -c1-200 || true))"
}
mkdir -p src jni aar sdks assets classes
jars=$(tr : '\n' < classpath) tests=""
ln -s $(grep android-all-instrumented <<< "$jars") sdks
android=$(echo sdks/*.jar) r8=$(grep /r8- <<< "$jars")
for aar in $(grep '\.aar$' <<< "$jars"); do
  unzip -qop "$aar" classes.jar > "aar/$(basename "$aar").jar"
done
for jar in $(grep -v 'android-all\|/r8-\|\.aar$' <<< "$jars") aar/*; do tests+=:$(realpath "$jar"); done

"$python" -m edge export "$root/tests/golden/llama-gqa-tied.gguf" -q --package kotlin --max-kv-size 512 --kv-policy streaming \
  --prefill-step-size 16 --threads 1 -o kit
cp kit/edge/src/main/resources/edge/runtime/libedge-*.so jni/libedge.so
cp kit/model.edge assets
"$python" - <<'END_OF_PYTHON'
from pathlib import Path

from edge.apps.archives import KOTLIN
from edge.apps.bindings import copy_source

app = KOTLIN / "project" / "app" / "src" / "main" / "kotlin" / "com" / "example" / "chat"
for path in [*KOTLIN.glob("src/edge/runtime/*.kt"), *(app / f"{name}.kt" for name in ("Chat", "Phone", "Turn"))]:
    copy_source(path, Path("src") / path.name)
END_OF_PYTHON
short="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC" # a third less time for short runs
# Robolectric's copy of Android's classes is compiled against, too, without the interface that it adds to each of them.
mkdir -p bare/org/robolectric/internal/bytecode
echo 'package org.robolectric.internal.bytecode; public interface ShadowedObject {}' > bare/org/robolectric/internal/bytecode/ShadowedObject.java
javac bare/org/robolectric/internal/bytecode/ShadowedObject.java
java $short -cp "$compiler/kotlin-compiler.jar" org.jetbrains.kotlin.cli.jvm.K2JVMCompiler -no-stdlib -no-reflect -nowarn \
  -jvm-target 17 -Xplugin="$compiler/kotlinx-serialization-compiler-plugin.jar" -cp "bare:$android$tests" -d classes \
  src "$here"/src/main/kotlin "$here"/src/test/kotlin

app() { # a folder with what the build tools make of an app. app FOLDER TARGET
  mkdir -p "$1/com/android/tools"
  cat > "$1/AndroidManifest.xml" <<END_OF_MANIFEST
<manifest xmlns:android="http://schemas.android.com/apk/res/android" package="com.example.chat" android:versionCode="1">
  <uses-sdk android:minSdkVersion="26" android:targetSdkVersion="$2"/>
  <application android:label="chat">
    <activity android:name="com.example.chat.ChatActivity" android:exported="true"/>
  </application>
</manifest>
END_OF_MANIFEST
  aapt2 link --manifest "$1/AndroidManifest.xml" -A assets -0 edge -o "$1/app.ap_" --proguard "$1/rules.pro" -I "$framework"
  cat > "$1/com/android/tools/test_config.properties" <<END_OF_PROPERTIES
android_resource_apk=$PWD/$1/app.ap_
android_merged_manifest=$PWD/$1/AndroidManifest.xml
android_custom_package=com.example.chat
END_OF_PROPERTIES
  echo "sdk=$sdk" > "$1/robolectric.properties"
}
check() { # check JAVA CLASS CLASSPATH
  "$1" $short -cp "$3$tests:$android" -Djava.library.path="$PWD/jni" -Drobolectric.offline=true -Dpictures="$PWD" \
    -Drobolectric.dependency.dir="$PWD/sdks" org.junit.runner.JUnitCore "$2" > "$2.log" 2>&1 || { cat "$2.log"; exit 1; }
  grep '^OK' "$2.log"
}
app plain 35
check "${newer:-java}" com.example.chat.ActivityTest classes:plain

[ -n "$newer" ] || { echo "make test-android: there is no Java 21, which Android 16 wants, so nothing ran minified"; exit 0; }
app minified 36
libraries=$(grep -E '/(kotlin-stdlib|kotlinx-coroutines-(core-jvm|android)|kotlinx-serialization-(core|json)-jvm)-[0-9.]*jar$' <<< "$jars")
for jar in $libraries; do unzip -qp "$jar" 'META-INF/proguard/*' 2> /dev/null || true; done > minified/libraries.pro
printf -- '-dontwarn %s\n' 'org.jetbrains.annotations.**' 'androidx.annotation.**' 'org.robolectric.internal.**' >> minified/libraries.pro
(cd classes && jar cf ../minified/classes.jar $(find . -name '*.class' ! -name 'ActivityTest*'))
java $short -cp "$r8" com.android.tools.r8.R8 --classfile --release --output minified/app.jar --lib "$android" \
  --lib "$(dirname "$(dirname "$(realpath "$(command -v javac)")")")" --pg-conf minified/rules.pro \
  --pg-conf minified/libraries.pro --pg-conf "$root/edge/apps/kotlin/consumer-rules.pro" minified/classes.jar $libraries \
  > r8.log 2>&1 || { cat r8.log; exit 1; }
"${newer}c" --release 21 -nowarn -d minified -cp "$android$tests" "$here"/src/minified/java/MinifiedTest.java
check "$newer" minified.MinifiedTest minified/app.jar:minified
